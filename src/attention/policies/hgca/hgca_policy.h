// Policy `hgca`: HGCA (arXiv 2507.03153). The device attends densely to a window of the newest
// blocks in HBM; beside it, in the same layer and with the same query, CPU workers attend to a
// selection of the rest. README.md maps the paper's algorithms to functions.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/policies/hgca/contextual_cache.h"
#include "src/attention/policy_options.h"

namespace sluice {

class HgcaPolicy : public OffloadPolicy {
 public:
  // Returns what the CPU attends to, for tests and benchmarks. REQUIRES: no step is under way.
  virtual const ContextualCache& contextual_cache() const = 0;
  // Returns the lse of the parts in the last step, [2][rows][heads]: the window's, then the CPU's.
  // In device memory.
  virtual const float* parts_lse(int layer) const = 0;

 protected:
  using OffloadPolicy::OffloadPolicy;
};

// Makes the policy. INVALID_ARGUMENT: the message names the option that is out of range.
// RESOURCE_EXHAUSTED: there is no memory for the tables. Errors of OffloadTier and CoAttention are
// passed on.
absl::StatusOr<std::unique_ptr<HgcaPolicy>> NewHgcaPolicy(const PolicyOptions& options);

}  // namespace sluice
