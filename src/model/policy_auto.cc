#include "src/model/policy_auto.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "src/attention/latent/latent_views.h"
#include "src/base/status_macros.h"
#include "src/model/policy_forecast.h"

namespace sluice {
namespace {

constexpr std::string_view kQualities[] = {"exact", "high", "fast"};
// Budgets of quality high as shares of the context, the largest first.
constexpr double kBudgetShares[] = {kMostBudgetShare, 0.2, 0.16, kLeastBudgetShare};
// `full` is taken where it is forecast to have at least this share of the best candidate's
// tokens/s. On a device without memory of its own the workers take the processor from the compute,
// which no forecast by bytes sees: there another policy has to promise twice as much.
constexpr double kAsFast = 0.95, kAsFastInOneMemory = 0.5;
// Budgets are whole blocks of any size that a node may have (block_tokens is 256 at most).
constexpr int64_t kBudgetStep = 256;

// Whether the policy attends to everything that the model attends to.
bool IsExact(std::string_view policy) { return policy == "full" || policy == "ess"; }

bool InDefaultForm(std::string_view policy) { return policy == "scout" || policy == "recall"; }

// Returns whether `a` serves what is asked for better than `b`, another budget of the same policy.
// More sequences are better, and of budgets that hold as many the larger one.
bool Serves(const AutoCandidate& a, const AutoCandidate& b) {
  if (a.running != b.running) return a.running > b.running;
  return a.of.budget_tokens > b.of.budget_tokens;
}

class Chooser {
 public:
  Chooser(const AutoAsk& ask, const DeviceRates& rates, const std::vector<AutoCandidate>& all)
      : ask_(ask), all_(all), as_fast_(rates.one_memory ? kAsFastInOneMemory : kAsFast) {
    choice_.verdicts.resize(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      AutoVerdict& verdict = choice_.verdicts[i];
      if (!all[i].status.ok() || all[i].running == 0) continue;
      const StepForecast step = ForecastStep(all[i].of.policy, all[i].bytes, ask.layers, rates);
      verdict.step_seconds = step.seconds;
      verdict.bound = step.bound;
      verdict.tokens_per_second = static_cast<double>(all[i].running) / step.seconds;
    }
  }

  absl::StatusOr<AutoChoice> Choose() {
    std::vector<size_t> left;
    for (size_t i = 0; i < all_.size(); ++i) {
      reason(i) = WhyNot(i);
      if (reason(i).empty()) left.push_back(i);
    }
    if (left.empty()) return NothingHolds();
    choice_.taken = *std::max_element(left.begin(), left.end(),
                                      [&](size_t a, size_t b) { return rate(a) < rate(b); });
    const std::optional<size_t> full = Full(left);
    const bool fits = full.has_value() && all_[*full].running >= ask_.sequences;
    if (fits && ask_.quality != Quality::kFast) {
      choice_.taken = *full;
      choice_.why = "it holds all of these sequences in HBM, whole";
    } else if (full.has_value() && rate(*full) >= as_fast_ * rate(choice_.taken)) {
      choice_.taken = *full;
      choice_.why = left.size() > 1
                        ? "no other policy of this quality is forecast to be clearly faster"
                        : OnlyFull();
    } else {
      choice_.why = absl::StrFormat(
          "it is forecast to be the fastest of quality %s: %.1f tokens/s with %d sequences at once",
          std::string(QualityName(ask_.quality)), rate(choice_.taken), all_[choice_.taken].running);
      if (full.has_value()) {
        absl::StrAppendFormat(&choice_.why, " (full: %.1f with %d)", rate(*full),
                              all_[*full].running);
      }
    }
    for (const size_t i : left) {
      if (i == choice_.taken) continue;
      reason(i) = rate(i) <= rate(choice_.taken) ? "is forecast to be no faster"
                  : fits                         ? "is faster, but full holds all that is asked for"
                                                 : "is forecast to be too little faster than full";
    }
    reason(choice_.taken) = absl::StrCat("taken: ", choice_.why);
    return choice_;
  }

 private:
  std::string& reason(size_t i) { return choice_.verdicts[i].reason; }
  double rate(size_t i) const { return choice_.verdicts[i].tokens_per_second; }

  // Returns the reason for which a candidate does not come into question; empty if it does.
  std::string WhyNot(size_t i) const {
    const AutoCandidate& c = all_[i];
    if (!c.status.ok()) return absl::StrCat("refused: ", c.status.message());
    if (c.running == 0) {
      return absl::StrCat("HBM and DRAM hold no sequence of ", ask_.context, " tokens");
    }
    if (!MeetsQuality(ask_.quality, c.of.policy, c.of.budget_tokens, ask_.context)) {
      return absl::StrCat("is not of quality ", std::string(QualityName(ask_.quality)));
    }
    for (const AutoCandidate& other : all_) {
      if (&other == &c || other.of.policy != c.of.policy || !other.status.ok()) continue;
      if (Serves(other, c)) {
        return other.running > c.running
                   ? absl::StrCat("a budget of ", other.of.budget_tokens, " holds ", other.running,
                                  " sequences")
                   : absl::StrCat("a budget of ", other.of.budget_tokens, " holds as many");
      }
    }
    return "";
  }

  std::optional<size_t> Full(const std::vector<size_t>& left) const {
    for (const size_t i : left) {
      if (all_[i].of.policy == "full") return i;
    }
    return std::nullopt;
  }

  // The sentence of a node on which full is all that there is.
  std::string OnlyFull() const {
    return absl::StrCat("it is the only policy of quality ", std::string(QualityName(ask_.quality)),
                        " that this node can run, with ", all_[choice_.taken].running, " of ",
                        ask_.sequences, " sequences at a time; the others wait");
  }

  absl::Status NothingHolds() const {
    std::vector<std::string> each;
    for (size_t i = 0; i < all_.size(); ++i) {
      each.push_back(absl::StrCat(PolicyText(all_[i].of), ": ", choice_.verdicts[i].reason));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "policy: auto with quality ", std::string(QualityName(ask_.quality)), " finds none that ",
        "holds one sequence of ", ask_.context, " tokens (", absl::StrJoin(each, "; "),
        "): lower max_context, raise hbm_bytes or dram_bytes",
        ask_.quality == Quality::kFast ? "" : ", or allow a lower quality"));
  }

  const AutoAsk& ask_;
  const std::vector<AutoCandidate>& all_;
  const double as_fast_;
  AutoChoice choice_;
};

}  // namespace

Quality QualityOf(std::string_view name) {
  const auto* const found = std::find(std::begin(kQualities), std::end(kQualities), name);
  SLUICE_CHECK(found != std::end(kQualities));
  return static_cast<Quality>(found - std::begin(kQualities));
}

std::string_view QualityName(Quality quality) { return kQualities[static_cast<size_t>(quality)]; }

bool MeetsQuality(Quality quality, std::string_view policy, int64_t budget_tokens,
                  int64_t context) {
  if (IsExact(policy) || quality == Quality::kFast) return true;
  if (quality == Quality::kExact || !InDefaultForm(policy)) return false;
  return static_cast<double>(budget_tokens) >= kLeastBudgetShare * static_cast<double>(context);
}

std::vector<PolicyAndBudget> AutoCandidates(Quality quality, const CacheLayout& layout,
                                            int64_t context, int64_t least_budget) {
  std::vector<PolicyAndBudget> out = {{"full", 0}};
  if (HasLatents(layout)) {
    if (HasIndexKeys(layout)) out.push_back({"ess", 0});
    return out;
  }
  if (quality == Quality::kExact) return out;
  for (const char* policy : {"scout", "recall"}) {
    if (quality == Quality::kFast) {
      out.push_back({policy, least_budget, /*digests=*/std::string_view(policy) == "scout"});
      continue;
    }
    for (const double share : kBudgetShares) {
      const auto blocks = static_cast<int64_t>(
          std::ceil(share * static_cast<double>(context) / static_cast<double>(kBudgetStep)));
      const int64_t budget = std::max(blocks * kBudgetStep, least_budget);
      if (out.back().policy != policy || out.back().budget_tokens != budget) {
        out.push_back({policy, budget});
      }
    }
  }
  if (quality == Quality::kFast) out.push_back({"hgca", 0});
  return out;
}

absl::StatusOr<AutoChoice> ChoosePolicy(const AutoAsk& ask, const DeviceRates& rates,
                                        const std::vector<AutoCandidate>& candidates) {
  SLUICE_CHECK(!candidates.empty());
  return Chooser(ask, rates, candidates).Choose();
}

std::string PolicyText(const PolicyAndBudget& of) {
  if (of.budget_tokens == 0) return of.policy;
  return absl::StrCat(of.policy, " with a budget of ", of.budget_tokens, " tokens");
}

std::string AutoText(const AutoAsk& ask, const DeviceRates& rates,
                     const std::vector<AutoCandidate>& candidates, const AutoChoice& choice) {
  const MemoryTraffic& r = rates.memory;
  std::string out =
      absl::StrFormat("policy auto, quality %s, %d sequences of %d tokens: %s, because %s\n",
                      std::string(QualityName(ask.quality)), ask.sequences, ask.context,
                      PolicyText(candidates[choice.taken].of), choice.why);
  absl::StrAppendFormat(&out,
                        "  measured: HBM %.1f GB/s, link %.1f and %.1f GB/s, DRAM %.1f GB/s, "
                        "an operator %.1f us\n",
                        r.hbm / 1e9, r.to_device / 1e9, r.to_host / 1e9, r.dram / 1e9,
                        rates.operator_seconds * 1e6);
  absl::StrAppendFormat(&out, "  %-8s %8s %8s %12s %11s %6s %9s  %s\n", "policy", "budget",
                        "running", "exact up to", "tokens/s", "bound", "step ms", "");
  for (size_t i = 0; i < candidates.size(); ++i) {
    const AutoCandidate& c = candidates[i];
    const AutoVerdict& v = choice.verdicts[i];
    const std::string budget =
        c.of.budget_tokens > 0 ? absl::StrCat(c.of.budget_tokens) : std::string("-");
    absl::StrAppendFormat(&out, "  %-8s %8s %8d %12d %11.1f %6s %9.2f  %s\n", c.of.policy, budget,
                          c.running, std::min(c.exact_tokens, ask.context), v.tokens_per_second,
                          v.bound.empty() ? "-" : v.bound, 1e3 * v.step_seconds, v.reason);
  }
  return out;
}

}  // namespace sluice
