// HGCA (arXiv 2507.03153): dense attention over a window of the newest blocks in HBM, and beside
// it, in the same layer and with the same query, attention of CPU workers over what was selected of
// the rest. README.md maps the paper's algorithms to functions.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/policies/hgca/contextual_cache.h"
#include "src/attention/policy_options.h"

namespace sluice {

class HgcaPolicy : public OffloadPolicy {
 public:
  // What the CPU attends to, for whoever watches. REQUIRES: no step is under way.
  virtual const ContextualCache& contextual_cache() const = 0;
  // Of the last step, in device memory: [2][rows][heads], the window's and the CPU's.
  virtual const float* parts_lse(int layer) const = 0;

 protected:
  using OffloadPolicy::OffloadPolicy;
};

// INVALID_ARGUMENT names the option that is out of range; RESOURCE_EXHAUSTED: no memory for the
// tables; the errors of OffloadTier and CoAttention.
absl::StatusOr<std::unique_ptr<HgcaPolicy>> NewHgcaPolicy(const PolicyOptions& options);

}  // namespace sluice
