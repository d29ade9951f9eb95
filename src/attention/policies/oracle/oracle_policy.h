// Policy `oracle`: bounds of block selection, from above and from below. Each decode row attends
// exactly, in the sequences' host caches, to the blocks of its budget. These are chosen by what no
// policy can afford to know beforehand (the row's true attention), or by nothing at all. It is for
// comparing policies, not for serving: the host caches are read where they lie.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the policy. INVALID_ARGUMENT: budget_tokens is below two blocks, or OffloadTier::Create
// refuses an option.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewOraclePolicy(const PolicyOptions& options);

}  // namespace sluice
