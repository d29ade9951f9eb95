// Policy auto: which policy a node takes for what its operator asks for. Pure functions over a
// plan of each candidate and the rates of the machine; src/server/auto_policy.h and sluice-bench
// make the candidates.
//
// The rule. Quality exact takes `full` or `ess`, which attend to everything that the model attends
// to. Quality high adds `scout` and `recall` in their default forms, with a budget of at least an
// eighth of the context and up to a quarter of it. Quality fast adds scout, recall and hgca in
// their own defaults. Under exact and high, `full` is taken where all the sequences that are asked
// for fit at once. Otherwise the candidate with the most forecast tokens/s is taken, and `full`
// among those that are forecast to be as fast within 5 % (on the CPU device: half as fast). `full`
// is a candidate of every quality, so it is also what remains where the others are refused: it then
// runs fewer sequences at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/device/memory_rates.h"
#include "src/kv/cache_layout.h"

namespace sluice {

enum class Quality { kExact, kHigh, kFast };
// REQUIRES: "exact", "high" or "fast".
Quality QualityOf(std::string_view name);
std::string_view QualityName(Quality quality);

// The shares of the context that a budget of quality high lies between.
inline constexpr double kLeastBudgetShare = 0.125;
inline constexpr double kMostBudgetShare = 0.25;

// Returns whether the policy, with a budget of `budget_tokens` for sequences of `context` tokens,
// is of that quality.
bool MeetsQuality(Quality quality, std::string_view policy, int64_t budget_tokens, int64_t context);

// A policy and its budget; 0: it has none.
struct PolicyAndBudget {
  std::string policy;
  int64_t budget_tokens = 0;
  // Policy scout selects blocks by their digests alone, as published.
  bool digests = false;
};
// Returns what is to be planned for a model with such caches, `full` first. Under quality high a
// policy comes with several budgets, the largest first; none is below `least_budget`, which quality
// fast takes as it is. Quality fast takes scout's published selection.
std::vector<PolicyAndBudget> AutoCandidates(Quality quality, const CacheLayout& layout,
                                            int64_t context, int64_t least_budget);

// The demand of the operator.
struct AutoAsk {
  Quality quality = Quality::kExact;
  int64_t sequences = 0;
  int64_t context = 0;  // tokens of each
  int layers = 0;       // of the model
};

// What a plan says of a candidate.
struct AutoCandidate {
  PolicyAndBudget of;
  absl::Status status;  // not OK: the settings or the device do not allow it
  int64_t running = 0;  // sequences of `context` tokens that run at once, at most those asked for
  MemoryTraffic bytes;  // that a step of so many moves
  int64_t exact_tokens = 0;  // up to which a sequence is decoded as by full
};

struct AutoVerdict {
  double step_seconds = 0;  // forecast; 0: nothing runs
  double tokens_per_second = 0;
  std::string bound;   // the memory that sets the step
  std::string reason;  // why it was taken or not
};

struct AutoChoice {
  size_t taken = 0;  // index of the candidate
  std::vector<AutoVerdict> verdicts;
  std::string why;  // a sentence for the log
};

// FAILED_PRECONDITION: no candidate holds one sequence of the context; the message says what each
// lacks and what to change. REQUIRES: `candidates` is not empty.
absl::StatusOr<AutoChoice> ChoosePolicy(const AutoAsk& ask, const DeviceRates& rates,
                                        const std::vector<AutoCandidate>& candidates);

// "scout with a budget of 2048 tokens", or the policy's name.
std::string PolicyText(const PolicyAndBudget& of);

// Returns the choice as a table: the rates, and a line for each candidate with its forecast and the
// reason.
std::string AutoText(const AutoAsk& ask, const DeviceRates& rates,
                     const std::vector<AutoCandidate>& candidates, const AutoChoice& choice);

}  // namespace sluice
