// What sluice-profile measured of a model and its traffic, as a file that a server reads
// (--policy-profile): recall intervals for policy `scout`, misses and stage times for policy `ess`,
// and beside the JSON, in a binary file of its own, the projection for policy `recall`. Any thread.
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

  // How the CPU's share of the budget grows from step to step. Without it `layers` is empty.
  int32_t block_tokens = 0;
  int32_t budget_tokens = 0;
  double share_limit = 0;
  struct Layer {
    int32_t interval = 0;        // steps from one recall to the next; 0: a dense layer
    std::vector<double> shares;  // means, by steps since the working set was made, from 1
  };
  std::vector<Layer> layers;

  // [layers][kv_heads][head_dim][rank]; without it rank is 0.
  int32_t projection_layers = 0, kv_heads = 0, head_dim = 0, rank = 0;
  std::vector<float> projection;

  MissProfile misses;  // may be empty
};

// The file that a profile's projection is in: `path`.projection.
std::string ProjectionPath(const std::string& path);

// Writes `path`, and ProjectionPath(path) where there is a projection. INVALID_ARGUMENT: the files
// cannot be written.
absl::Status WritePolicyProfile(const PolicyProfile& profile, const std::string& path);

// NOT_FOUND: no such file. INVALID_ARGUMENT: not a profile, another version of its format, a value
// out of range, or a projection that is not the one that was written with it; names the file, the
// key and the remedy.
absl::StatusOr<PolicyProfile> ReadPolicyProfile(const std::string& path);

// Fills in what the policies of `options` take from a profile. `layout`: of the model that has that
// fingerprint. FAILED_PRECONDITION: it was made for another model, or under other settings; names
// what does not fit.
absl::Status ApplyPolicyProfile(const PolicyProfile& profile, const std::string& model_fingerprint,
                                const CacheLayout& layout, PolicyOptions* options);

}  // namespace sluice
