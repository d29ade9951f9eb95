// Formats what `sluice-bench policies --quality` measured as tables and JSON.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "src/bench/policies/policy_quality.h"
#include "src/bench/report/report.h"

namespace sluice::bench {

// Returns a table of the distance from `full` over all texts, and a table of the pass keys; each is
// left out where nothing was measured.
std::string QualityText(const QualityResult& result);

// Adds figures, and to the details:
//   quality   a list of {policy, budget_share, context, steps, top1_agreement, mean_kl_nats,
//             perplexity, perplexity_change, texts [{name, kind, ...}], and, beside policy oracle
//             at the same budget, top1_below_oracle and perplexity_over_oracle}
//   passkeys  a list of {name, kind, variant, tokens, depth, full, full_right, policies [{policy,
//   budget_share,
//             budget_tokens, found, right, blame}]}
void AddQuality(const QualityResult& result, Report* report);

// Returns a bar of the share that is done, with the time that the rest will take.
std::string ProgressBar(double done, absl::Duration elapsed);

}  // namespace sluice::bench
