// ESS (policies/ess/README.md): latent entries at home in DRAM, the working set of each layer in a
// Sparse Memory Pool in HBM, misses fetched beneath the layer's own compute. `offload-naive` is the
// same with its ideas switched off: fetch all, wait, then attend.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// FAILED_PRECONDITION: the model has no latent caches with an indexer; INVALID_ARGUMENT: an option
// is out of range; RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewEssPolicy(const PolicyOptions& options);

}  // namespace sluice
