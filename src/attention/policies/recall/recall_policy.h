// Recall, as InfiniGen does it (OSDI 24, arXiv 2406.19707): what a layer will attend to is guessed
// one layer ahead from partial queries and keys, and the chosen tokens' K and V are brought to HBM
// beneath the layer before. The CPU attends to nothing.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// INVALID_ARGUMENT: budget_tokens, rank or projection do not fit the model's shape;
// RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewRecallPolicy(const PolicyOptions& options);

}  // namespace sluice
