// A policy profile: what sluice-profile measured of a model and its traffic, as a file that a
// server reads (--policy-profile). It holds recall intervals for policy `scout`, thresholds for
// `hgca`, gates and similarities of heads and hash matrices for `clo`, misses and stage times for
// `ess`, and margins and the projection for `recall`. Matrices lie in binary files of their own
// beside the JSON. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/attention/miss_profile.h"
#include "src/attention/policy_options.h"
#include "src/kv/cache_layout.h"

namespace sluice {

struct PolicyProfile {
  std::string model_fingerprint;  // 64 hexadecimal digits

  // How the CPU's share of the budget grows from step to step. `layers` is empty if it was not
  // measured.
  int32_t block_tokens = 0;
  int32_t budget_tokens = 0;
  double share_limit = 0;
  struct Layer {
    int32_t interval = 0;        // steps from one recall to the next; 0: a dense layer
    std::vector<double> shares;  // mean shares, by steps since the working set was made, from 1
  };
  std::vector<Layer> layers;

  // A matrix for each layer and KV head. There is none if `columns` is 0.
  struct Matrices {
    int32_t layers = 0, kv_heads = 0, head_dim = 0, columns = 0;
    std::vector<float> values;  // [layers][kv_heads][head_dim][columns]
  };
  Matrices projection;  // of recall
  Matrices hash;        // of clo; a column for each bit

  // The betas with which what hgca selects holds a share of the attention outside its window.
  struct Thresholds {
    int64_t window_tokens = 0;
    double share = 0;
    int32_t kv_heads = 0;
    std::vector<float> betas;  // [layers][kv_heads]; empty: not measured
  } hgca;

  // The margins with which what recall selects, and its ring, hold a share of a row's attention.
  struct Margins {
    int32_t rank = 0;  // columns of the projection that they were measured with
    double share = 0;
    std::vector<float> by_layer;  // empty: not measured
  } margins;

  // How heads of policy clo differ (policies/clo/head_thresholds.h).
  struct Similarities {
    int32_t kv_heads = 0;
    std::vector<float> gates;         // [layers][heads]; empty: not measured
    std::vector<float> similarities;  // [layers][kv_heads], of queries in neighbouring steps
    std::vector<float> misses;        // [layers][kv_heads], the share of lookups at a cosine of 0.8
    // Refills of a head that a layer hides, per row (PrefetchableHeads); 0: not measured.
    double prefetchable = 0;
    // [layers], the cosine of a layer's queries with those that were predicted; empty: not measured
    std::vector<float> predicted = {};
    // [layers][kv_heads], of queries with the label that they are compared with at a cosine of 0.8.
    // Written for people and not read.
    std::vector<float> label_similarities = {};
    // PersistenceOrder at a cosine of 0.8. It is written for plots and not read.
    std::vector<int64_t> persistence_order = {};
  } clo;

  MissProfile misses;  // may be empty
};

// Return the names of the files that a profile's projection and hash matrices are in:
// `path`.projection and `path`.hash.
std::string ProjectionPath(const std::string& path);
std::string HashPath(const std::string& path);

// Writes `path`, and the files of the matrices that there are. INVALID_ARGUMENT: the files
// cannot be written.
absl::Status WritePolicyProfile(const PolicyProfile& profile, const std::string& path);

// Reads a profile. NOT_FOUND: there is no such file. INVALID_ARGUMENT: the file is not a profile,
// has another version of the format or a value out of range, or its projection is not the one that
// was written with it; the message names the file, the key and the remedy.
absl::StatusOr<PolicyProfile> ReadPolicyProfile(const std::string& path);

// Returns what a profile of the whole model says of a rank's heads. Where a part of the profile is
// not of a model with so many heads, it stays as it is, and ApplyPolicyProfile says so.
PolicyProfile ProfileOfRank(PolicyProfile profile, const HeadsOfRank& heads,
                            const HeadsOfRank& kv_heads);

// Fills in what the policies of `options` take from a profile, on a rank what they take of its
// heads. `layout` is that of the model with fingerprint `model_fingerprint`. FAILED_PRECONDITION:
// the profile was made for another model or under other settings; the message names what does not
// fit.
absl::Status ApplyPolicyProfile(const PolicyProfile& of_model, const std::string& model_fingerprint,
                                const CacheLayout& layout, PolicyOptions* options);

}  // namespace sluice
