// Policies on real text: how far their logits are from those of `full`, and which hidden pass keys
// a greedy decode finds.
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
  Distance distance;       // from `full`, over every text
  int64_t passkeys = 0;    // asked for
  int64_t found = 0;       // of them
  int64_t found_full = 0;  // found by `full`
  int64_t lost = 0;        // found by `full`, and not by this one
};

struct QualityOptions {
  int context = 2048;          // tokens of a text that are handed over
  int steps = 64;              // tokens dictated after them
  int texts = 2;               // at most
  int passkeys = 20;           // at most
  double budget_share = 0.25;  // of the context, a pass key's own for a pass key
};

// For every policy, in their order; `full` is computed whether or not it is among them. The
// budgets are in whole blocks. `progress` is told of every case that is done.
absl::StatusOr<std::vector<PolicyQuality>> MeasureQuality(
    PolicyWorld world, const std::vector<std::string>& policies, const QualityTexts& texts,
    const QualityOptions& options, const std::function<void(const std::string&)>& progress);

// `share` of `context` tokens, in whole blocks, at least four of them.
int QualityBudget(int context, double share, int block_tokens);

}  // namespace sluice::bench
