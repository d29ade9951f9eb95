// Policy ess (policies/ess/README.md): latent entries lie in DRAM, the working set of each layer
// lies in a Sparse Memory Pool in HBM, and misses are fetched beneath the layer's own compute.
// `offload-naive` is the same class with its ideas switched off: it fetches everything, waits, then
// attends.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// FAILED_PRECONDITION: the model has no latent caches with an indexer. INVALID_ARGUMENT: an option
// is out of range. RESOURCE_EXHAUSTED: there is no memory.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewEssPolicy(const PolicyOptions& options);

}  // namespace sluice
