// The profile of a model with keys and values of heads: recall intervals for policy scout, a
// projection and margins for recall, thresholds for hgca, gates, similarities and
// hash matrices of heads for clo.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "src/attention/policy_options.h"
#include "src/attention/policy_profile.h"

namespace sluice {

struct KvProfileOptions {
  std::string model, device = "cpu", kernels = "auto", traffic;
  bool dummy = false;
  // Takes weights and prompts of the topic-drift workload (topic_drift.h).
  bool topic_drift = false;
  double drift = 0.011, turning_heads = 0, turning = 0.25, layer_change = 0.25;  // as there
  int64_t drift_context = 0;  // TopicDrift::max_context; 0: as `context`
  int64_t threads = 0;        // 0: as the server chooses
  int64_t workers = 1;
  int64_t prompts = 4, context = 1024, seed = 1, steps = 64;
  int64_t block_tokens = 32, budget_tokens = 2048, dense_layers = 2;

  bool intervals = true;
  double share_limit = PolicyOptions::Scout().share_limit;
  bool skew = false;
  int64_t rank = 0, skew_tokens = 1024;
  bool margins = false;
  double recall_share = 0.99;
  bool clo = false;
  // Rows and tokens of the batch that is planned, and the divisor of the budget as served: for the
  // number of heads whose refills are hidden. 0 rows: it is not measured.
  int64_t clo_batch = 0, clo_context = 32768, clo_divisor = 10;
  bool hash = false;
  int64_t hash_tokens = 2048;
  bool betas = false;
  int64_t hgca_window = 512;
  double hgca_share = 0.99;
};

// Returns the profile, and prints a table of each part to standard output. Errors name the flag and
// the remedy, or are those of the model, the device and the policy.
absl::StatusOr<PolicyProfile> ProfileKv(const KvProfileOptions& options);

}  // namespace sluice
