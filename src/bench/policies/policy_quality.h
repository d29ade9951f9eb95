// Measures policies on real text: how far their logits are from those of `full`, and which hidden
// pass keys a greedy decode finds.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/policies/quality.h"

namespace sluice::bench {

struct PolicyQuality {
  std::string policy;
  Distance distance;       // Distance from `full`, over every text.
  int64_t passkeys = 0;    // Pass keys asked for.
  int64_t found = 0;       // Found by this policy.
  int64_t found_full = 0;  // Found by `full`.
  int64_t lost = 0;        // Found by `full` and not by this policy.
};

struct QualityOptions {
  int context = 2048;          // Tokens of a text that are handed over.
  int steps = 64;              // Tokens dictated after them.
  int texts = 2;               // Maximum number of texts.
  int passkeys = 20;           // Maximum number of pass keys.
  double budget_share = 0.25;  // Share of the context; a pass key has its own context.
};

// Measures every policy, in the order of `policies`; `full` is computed whether or not it is among
// them. Budgets are whole blocks. `progress` is called after every case.
absl::StatusOr<std::vector<PolicyQuality>> MeasureQuality(
    PolicyWorld world, const std::vector<std::string>& policies, const QualityTexts& texts,
    const QualityOptions& options, const std::function<void(const std::string&)>& progress);

// Returns `share` of `context` tokens in whole blocks, at least four of them.
int QualityBudget(int context, double share, int block_tokens);

}  // namespace sluice::bench
