// Policy `recall`, after InfiniGen (OSDI 24, arXiv 2406.19707). Partial queries and keys predict
// one layer ahead what a layer will attend to, and the K and V of the chosen tokens are fetched to
// HBM while the layer before runs. The CPU attends to nothing.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the policy. INVALID_ARGUMENT: budget_tokens, rank or projection do not fit the model's
// shape. RESOURCE_EXHAUSTED: there is no memory for its tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewRecallPolicy(const PolicyOptions& options);

}  // namespace sluice
