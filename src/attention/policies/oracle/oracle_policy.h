// Policy `oracle`: the bounds of block selection, from above and from below. Each decode row
// attends exactly, in the sequences' home, to the blocks of its budget, chosen by what no policy
// can afford to know beforehand (its true attention), or by nothing at all. For comparing policies,
// not for serving: the home is read where it lies.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// INVALID_ARGUMENT: budget_tokens below two blocks, or what OffloadTier::Create refuses.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewOraclePolicy(const PolicyOptions& options);

}  // namespace sluice
