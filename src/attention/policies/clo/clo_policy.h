// Policy `clo`, after CLO (CPU-light KV cache offloading): each KV head keeps the tokens that it
// selected, and selects anew only when its queries have turned away from those for which it did.
// The tokens that it selects then are fetched to HBM while the layer before runs. Hash codes (HATA)
// select.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the policy. INVALID_ARGUMENT: budget_tokens or an option of PolicyOptions::Clo does not fit
// the model's shape; the message names it. RESOURCE_EXHAUSTED: there is no memory for its tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewCloPolicy(const PolicyOptions& options);

}  // namespace sluice
