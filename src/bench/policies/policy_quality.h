// Measures policies on real text: how far their logits are from those of `full`, which hidden pass
// keys a greedy decode finds, and which part of a policy loses those that it does not find.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/policies/quality.h"

namespace sluice::bench {

// Why a policy lost a key that `full` finds. The case is run again with one thing changed at a
// time: with the queries of `full` in place of the predicted ones, and with each step computed
// several times, so that what the step selected is resident and averages have settled.
enum class Blame {
  kNone,    // The key was found.
  kScore,   // Neither helps, but the exact top blocks of the same budget find the key.
  kAge,     // Repeated steps alone help: the key's part was selected or resident too late.
  kQuery,   // The queries of `full` alone help, or together with repeated steps.
  kCpu,     // Either helps, and there are CPU workers: they attended with the predicted query.
  kBudget,  // Nothing helps, and the exact top blocks of the same budget do not find it either.
};
inline constexpr int kBlames = 6;
// Returns a word for a report: none, score, age, query, cpu or budget.
const char* BlameName(Blame blame);
// The evidence that the runs of a lost case give. `real`: the queries of `full` help. `settled`:
// repeated steps help. `both`: the two together help. `oracle`: the exact top blocks find the key.
struct BlameEvidence {
  bool real = false, settled = false, both = false, oracle = false, workers = false;
};
Blame BlameOf(const BlameEvidence& evidence);

// A policy at a budget, over all texts.
struct PolicyQuality {
  struct Text {
    std::string name, kind;
    Distance distance;  // Distance from `full`.
  };
  std::string policy;
  double budget_share = 1;  // Share of the context. Policy `full` has no budget.
  std::vector<Text> texts;
  Distance All() const;
};

struct PasskeyOutcome {
  size_t policy = 0;  // Index in QualityResult::policies.
  int budget_tokens = 0;
  bool found = false;
  int right = 0;  // Tokens of the answer before the first wrong one.
  Blame blame = Blame::kNone;
};
struct PasskeyCase {
  std::string name, kind, variant;
  int tokens = 0;
  double depth = 0;
  bool full = false;   // `full` finds the key. If not, no other policy is asked.
  int full_right = 0;  // Tokens of the answer that `full` gives before the first wrong one.
  std::vector<PasskeyOutcome> outcomes;
};

struct QualityResult {
  int context = 0;  // Tokens of each text before the dictated ones.
  std::vector<PolicyQuality> policies;
  std::vector<PasskeyCase> passkeys;
};

struct QualityOptions {
  int context = 2048;  // Tokens of a text that are handed over.
  int steps = 256;     // Tokens dictated after them.
  int texts = 12;      // Maximum number of texts.
  int passkeys = 72;   // Maximum number of pass keys.
  // Shares of the context; a pass key has its own context.
  std::vector<double> budget_shares = {0.125, 0.25};
  bool blame = true;  // Run lost cases again to see why.
};

// Says what is about to be computed, in a word that phases of a clock have ("prompts": a new case
// begins) and in detail; which share of all cases is done; and what they have given so far.
using QualityProgress = std::function<void(const std::string& phase, const std::string& detail,
                                           double done, const QualityResult& so_far)>;

// Measures every policy, in the order of `policies`, at every budget; `full` is computed whether or
// not it is among them. Budgets are whole blocks. A policy whose name sets a budget has only that.
absl::StatusOr<QualityResult> MeasureQuality(PolicyWorld world,
                                             const std::vector<std::string>& policies,
                                             const QualityTexts& texts,
                                             const QualityOptions& options,
                                             const QualityProgress& progress);

// Returns `share` of `context` tokens in whole blocks, at least four of them.
int QualityBudget(int context, double share, int block_tokens);

}  // namespace sluice::bench
