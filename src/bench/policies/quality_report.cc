#include "src/bench/policies/quality_report.h"

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

using nlohmann::json;
using Text = PolicyQuality::Text;

std::string BudgetName(const PolicyQuality& quality) {
  return quality.budget_share == 1 ? "-" : absl::StrFormat("%g%%", 100 * quality.budget_share);
}

// Returns policy oracle at the same budget; null if it was not measured.
const PolicyQuality* OracleOf(const QualityResult& result, const PolicyQuality& quality) {
  for (const PolicyQuality& other : result.policies) {
    if (other.policy == "oracle" && other.budget_share == quality.budget_share) return &other;
  }
  return nullptr;
}

struct Spread {
  double least = 0, most = 0;
};
Spread SpreadOf(const std::vector<Text>& texts,
                const std::function<double(const Distance&)>& figure) {
  Spread out{figure(texts.front().distance), figure(texts.front().distance)};
  for (const Text& text : texts) {
    out.least = std::min(out.least, figure(text.distance));
    out.most = std::max(out.most, figure(text.distance));
  }
  return out;
}

Spread Agreement(const PolicyQuality& quality) {
  return SpreadOf(quality.texts, [](const Distance& d) { return d.top1_agreement(); });
}

std::string DistanceLine(const QualityResult& result, const PolicyQuality& quality) {
  const Distance all = quality.All();
  const Spread agreement = Agreement(quality);
  const Spread change =
      SpreadOf(quality.texts, [](const Distance& d) { return d.perplexity_change(); });
  std::string out = absl::StrFormat("%-24s %6s %6d  %6.2f%% (%5.1f-%5.1f) ", quality.policy,
                                    BudgetName(quality), all.steps(), 100 * all.top1_agreement(),
                                    100 * agreement.least, 100 * agreement.most);
  const PolicyQuality* const oracle = OracleOf(result, quality);
  const auto beside = [&](const char* form, double value) {
    absl::StrAppend(
        &out, oracle == nullptr ? absl::StrFormat("%8s", "-") : absl::StrFormat("%+8.2f", value),
        form);
  };
  const Distance of_oracle = oracle == nullptr ? all : oracle->All();
  beside("  ", 100 * (all.top1_agreement() - of_oracle.top1_agreement()));
  absl::StrAppendFormat(&out, "%8.5f  %8.3f %+7.2f%% (%+6.1f to %+6.1f) ", all.mean_kl(),
                        all.perplexity(), 100 * all.perplexity_change(), 100 * change.least,
                        100 * change.most);
  beside("\n", 100 * (all.perplexity() / of_oracle.perplexity() - 1));
  return out;
}

// How many keys of those that `full` finds a policy finds.
struct Found {
  int found = 0, asked = 0;
  std::string ToText() const { return absl::StrCat(found, "/", asked); }
};
Found Count(const QualityResult& result, size_t policy,
            const std::function<bool(const PasskeyCase&)>& counts) {
  Found out;
  for (const PasskeyCase& passkey : result.passkeys) {
    if (!passkey.full || !counts(passkey)) continue;
    ++out.asked;
    out.found += passkey.outcomes[policy].found ? 1 : 0;
  }
  return out;
}

std::array<int, kBlames> CountBlames(const QualityResult& result, size_t policy) {
  std::array<int, kBlames> out{};
  for (const PasskeyCase& passkey : result.passkeys) {
    if (passkey.full) ++out[static_cast<size_t>(passkey.outcomes[policy].blame)];
  }
  return out;
}

// Returns the values that a field of the cases has, in order of appearance.
std::vector<std::string> ValuesOf(const QualityResult& result, std::string PasskeyCase::*field) {
  std::vector<std::string> out;
  for (const PasskeyCase& passkey : result.passkeys) {
    if (std::find(out.begin(), out.end(), passkey.*field) == out.end()) {
      out.push_back(passkey.*field);
    }
  }
  return out;
}

std::string PasskeyTable(const QualityResult& result) {
  const auto cases = static_cast<int>(result.passkeys.size());
  const auto full = std::count_if(result.passkeys.begin(), result.passkeys.end(),
                                  [](const PasskeyCase& passkey) { return passkey.full; });
  const std::vector<std::string> kinds = ValuesOf(result, &PasskeyCase::kind);
  const std::vector<std::string> variants = ValuesOf(result, &PasskeyCase::variant);
  std::string out = absl::StrFormat(
      "\npass keys: full finds %d of %d; found of these, by kind and variant, and why the others "
      "were lost\n%-24s %6s %7s",
      full, cases, "policy", "budget", "found");
  for (const auto& names : {kinds, variants}) {
    absl::StrAppend(&out, " |");
    for (const std::string& name : names) absl::StrAppendFormat(&out, " %8s", name);
  }
  absl::StrAppend(&out, " |");
  for (int blame = 1; blame < kBlames; ++blame) {
    absl::StrAppendFormat(&out, " %6s", BlameName(static_cast<Blame>(blame)));
  }
  absl::StrAppend(&out, "\n");
  for (size_t i = 0; i < result.policies.size(); ++i) {
    const PolicyQuality& quality = result.policies[i];
    absl::StrAppendFormat(&out, "%-24s %6s %7s", quality.policy, BudgetName(quality),
                          Count(result, i, [](const PasskeyCase&) { return true; }).ToText());
    for (const auto& [names, field] :
         {std::pair{kinds, &PasskeyCase::kind}, std::pair{variants, &PasskeyCase::variant}}) {
      absl::StrAppend(&out, " |");
      for (const std::string& name : names) {
        const Found found =
            Count(result, i, [&](const PasskeyCase& passkey) { return passkey.*field == name; });
        absl::StrAppendFormat(&out, " %8s", found.ToText());
      }
    }
    absl::StrAppend(&out, " |");
    const std::array<int, kBlames> blames = CountBlames(result, i);
    for (size_t blame = 1; blame < kBlames; ++blame) {
      absl::StrAppendFormat(&out, " %6d", blames[blame]);
    }
    absl::StrAppend(&out, "\n");
  }
  return out;
}

json DistanceJson(const Distance& distance) {
  return {{"steps", distance.steps()},
          {"top1_agreement", distance.top1_agreement()},
          {"mean_kl_nats", distance.mean_kl()},
          {"perplexity", distance.perplexity()},
          {"perplexity_change", distance.perplexity_change()}};
}

json PasskeyJson(const QualityResult& result, const PasskeyCase& passkey) {
  json out = {{"name", passkey.name},
              {"kind", passkey.kind},
              {"variant", passkey.variant},
              {"tokens", passkey.tokens},
              {"depth", passkey.depth},
              {"full", passkey.full},
              {"full_right", passkey.full_right},
              {"policies", json::array()}};
  for (const PasskeyOutcome& outcome : passkey.outcomes) {
    const PolicyQuality& quality = result.policies[outcome.policy];
    out["policies"].push_back({{"policy", quality.policy},
                               {"budget_share", quality.budget_share},
                               {"budget_tokens", outcome.budget_tokens},
                               {"found", outcome.found},
                               {"right", outcome.right},
                               {"blame", BlameName(outcome.blame)}});
  }
  return out;
}

Figure ShareFigure(std::string name, double value, Spread spread, int64_t samples) {
  Figure figure;
  figure.name = std::move(name);
  figure.unit = "1";
  figure.median = value;
  figure.low = spread.least;
  figure.high = spread.most;
  figure.samples = samples;
  return figure;
}

}  // namespace

std::string QualityText(const QualityResult& result) {
  std::string out;
  const bool texts = !result.policies.empty() && !result.policies.front().texts.empty();
  if (texts) {
    absl::StrAppendFormat(
        &out,
        "\n%d texts of %d tokens: over all of them, with the least and the largest of a text\n"
        "%-24s %6s %6s  %7s %13s %9s %9s  %8s %8s %18s %8s\n",
        result.policies.front().texts.size(), result.context, "policy", "budget", "steps", "top-1",
        "", "- oracle", "KL, nats", "perpl.", "change", "", "/ oracle");
    for (const PolicyQuality& quality : result.policies) {
      absl::StrAppend(&out, DistanceLine(result, quality));
    }
  }
  if (!result.passkeys.empty()) absl::StrAppend(&out, PasskeyTable(result));
  return out;
}

void AddQuality(const QualityResult& result, Report* report) {
  for (size_t i = 0; i < result.policies.size(); ++i) {
    const PolicyQuality& quality = result.policies[i];
    const std::string name = absl::StrCat(quality.policy, ", budget ", BudgetName(quality));
    if (!result.passkeys.empty()) {
      const Found found = Count(result, i, [](const PasskeyCase&) { return true; });
      if (found.asked > 0) {
        const double share = static_cast<double>(found.found) / found.asked;
        report->figures.push_back(ShareFigure(absl::StrCat("pass keys found, ", name), share,
                                              {share, share}, found.asked));
      }
    }
    if (quality.texts.empty()) continue;
    const Distance all = quality.All();
    report->figures.push_back(
        ShareFigure(absl::StrCat("top-1 agreement with full, ", name, ", context ", result.context),
                    all.top1_agreement(), Agreement(quality), all.steps()));
    report->figures.back().more = {{"mean_kl_nats", all.mean_kl()},
                                   {"perplexity", all.perplexity()},
                                   {"perplexity_change", all.perplexity_change()}};
    json entry = DistanceJson(all);
    entry["policy"] = quality.policy;
    entry["budget_share"] = quality.budget_share;
    entry["context"] = result.context;
    if (const PolicyQuality* const oracle = OracleOf(result, quality)) {
      entry["top1_below_oracle"] = oracle->All().top1_agreement() - all.top1_agreement();
      entry["perplexity_over_oracle"] = all.perplexity() / oracle->All().perplexity() - 1;
    }
    for (const Text& text : quality.texts) {
      json part = DistanceJson(text.distance);
      part["name"] = text.name;
      part["kind"] = text.kind;
      entry["texts"].push_back(std::move(part));
    }
    report->details["quality"].push_back(std::move(entry));
  }
  for (const PasskeyCase& passkey : result.passkeys) {
    report->details["passkeys"].push_back(PasskeyJson(result, passkey));
  }
}

std::string ProgressBar(double done, absl::Duration elapsed) {
  constexpr int kWidth = 24;
  const auto filled = static_cast<size_t>(std::clamp(done, 0.0, 1.0) * kWidth);
  std::string out = absl::StrCat("[", std::string(filled, '='), std::string(kWidth - filled, ' '),
                                 absl::StrFormat("] %3.0f%%", 100 * done));
  if (done > 0) {
    const double left = absl::ToDoubleSeconds(elapsed) * (1 - done) / done;
    absl::StrAppendFormat(&out, ", %.0f s left", left);
  }
  return absl::StrCat(out, "  ");
}

}  // namespace sluice::bench
