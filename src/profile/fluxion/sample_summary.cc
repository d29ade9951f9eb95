#include "src/profile/fluxion/sample_summary.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/policy_run.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr size_t kSizes = kSampleBlocks.size();
constexpr int64_t kMostLayers = 65'536;  // and heads of a layer
constexpr int kPercentileStep = 5;

double LogBlock(size_t i) { return std::log2(static_cast<double>(kSampleBlocks[i])); }

double Mean(const BlockBudgets& budgets) {
  return std::accumulate(budgets.begin(), budgets.end(), 0.0) / double{kSizes};
}

// Returns the line with its R2.
BudgetLine Judged(double at_one, double slope, const BlockBudgets& budgets) {
  if (std::all_of(budgets.begin(), budgets.end(), [&](double b) { return b == budgets[0]; })) {
    return {at_one, slope, std::nan("")};
  }
  const double mean = Mean(budgets);
  double errors = 0, distances = 0;
  for (size_t i = 0; i < kSizes; ++i) {
    errors += std::pow(budgets[i] - at_one - slope * LogBlock(i), 2);
    distances += std::pow(budgets[i] - mean, 2);
  }
  return {at_one, slope, 1 - errors / distances};
}

// Budgets by size of block, of some samples.
struct BudgetLists {
  std::array<std::vector<double>, kSizes> of;

  void Add(const BlockBudgets& budgets) {
    for (size_t i = 0; i < kSizes; ++i) of[i].push_back(budgets[i]);
  }
  BlockBudgets At(double share) const {
    BlockBudgets out;
    for (size_t i = 0; i < kSizes; ++i) out[i] = bench::Percentile(of[i], share);
    return out;
  }
};

LineSummary Summarized(const std::vector<double>& r2) {
  LineSummary out;
  out.samples = std::ssize(r2);
  if (r2.empty()) return out;
  for (int percent = 0; percent <= 100; percent += kPercentileStep) {
    out.percentiles.push_back(bench::Percentile(r2, percent / 100.0));
  }
  const auto good = std::count_if(r2.begin(), r2.end(), [](double x) { return x >= kGoodLine; });
  out.good = static_cast<double>(good) / static_cast<double>(r2.size());
  return out;
}

absl::Status CheckSample(const FluxionSample& sample, size_t number) {
  const auto is_number = [](float x) {
    return x >= 0 && x < float{kMostLayers} && x == std::floor(x);
  };
  const auto is_share = [](float x) { return x >= 0 && x <= 1; };
  if (is_number(sample.features[0]) && is_number(sample.features[1]) &&
      std::all_of(sample.budgets.begin(), sample.budgets.end(), is_share)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("sample ", number,
                   ": its layer, its head or a budget is out of range: collect the samples again"));
}

// Samples as they come, and what is to be known of all of them.
class Gathered {
 public:
  void Add(const FluxionSample& sample, const FluxionPredictor* predictor) {
    documents_.insert(sample.document);
    const auto layer = static_cast<int64_t>(sample.features[0]);
    const auto number = static_cast<int64_t>(sample.features[1]);
    auto& [head, budgets_of_head] = heads_[{layer, number}];
    head.layer = layer;
    head.head = number;
    ++head.samples;
    head.streaming += sample.streaming ? 1 : 0;
    if (predictor != nullptr) {
      const bool told = predictor->Predict(sample.features).streaming;
      head.told += told ? 1 : 0;
      head.right += told == sample.streaming ? 1 : 0;
    }
    if (sample.streaming) return;
    BlockBudgets budgets;
    std::copy(sample.budgets.begin(), sample.budgets.end(), budgets.begin());
    budgets_.Add(budgets);
    budgets_of_head.Add(budgets);
    // Budgets that are equal at all sizes have no R2 with either line.
    const double r2 = FitBudgetLine(budgets).r2;
    if (std::isnan(r2)) return;
    fitted_.push_back(r2);
    pinned_.push_back(PinBudgetLine(budgets).r2);
  }

  SampleSummary Summary() const {
    SampleSummary out;
    out.documents = std::ssize(documents_);
    out.first = budgets_.At(0.25);
    out.median = budgets_.At(0.5);
    out.third = budgets_.At(0.75);
    out.fitted = Summarized(fitted_);
    out.pinned = Summarized(pinned_);
    for (const auto& [key, value] : heads_) {
      HeadSummary& head = out.heads.emplace_back(value.first);
      head.budgets = value.second.At(0.5);
      head.line = FitBudgetLine(head.budgets);
      out.streaming += head.streaming;
      out.told += head.told;
      out.right += head.right;
    }
    return out;
  }

 private:
  std::set<int32_t> documents_;
  std::map<std::pair<int64_t, int64_t>, std::pair<HeadSummary, BudgetLists>> heads_;
  BudgetLists budgets_;
  std::vector<double> fitted_, pinned_;
};

json LineJson(const LineSummary& line) {
  return {{"samples", line.samples},
          {"r2_percentiles", line.percentiles},
          {"r2_good", kGoodLine},
          {"good", line.good}};
}

json HeadJson(const HeadSummary& head, bool predicted) {
  json out = {{"layer", head.layer},
              {"head", head.head},
              {"samples", head.samples},
              {"streaming", head.streaming},
              {"told", predicted ? json(head.told) : json()},
              {"right", predicted ? json(head.right) : json()},
              {"budgets", nullptr},
              {"line", nullptr}};
  if (head.streaming == head.samples) return out;
  out["budgets"] = head.budgets;
  out["line"] = {{"at_one", head.line.at_one}, {"slope", head.line.slope}, {"r2", head.line.r2}};
  return out;
}

double Percent(int64_t part, int64_t all) {
  return all == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

BudgetLine FitBudgetLine(const BlockBudgets& budgets) {
  double middle = 0;
  for (size_t i = 0; i < kSizes; ++i) middle += LogBlock(i) / double{kSizes};
  const double mean = Mean(budgets);
  double products = 0, squares = 0;
  for (size_t i = 0; i < kSizes; ++i) {
    products += (LogBlock(i) - middle) * (budgets[i] - mean);
    squares += std::pow(LogBlock(i) - middle, 2);
  }
  const double slope = products / squares;
  return Judged(mean - slope * middle, slope, budgets);
}

BudgetLine PinBudgetLine(const BlockBudgets& budgets) {
  double products = 0, squares = 0;
  for (size_t i = 0; i < kSizes; ++i) {
    products += LogBlock(i) * (budgets[i] - budgets[0]);
    squares += std::pow(LogBlock(i), 2);
  }
  return Judged(budgets[0], products / squares, budgets);
}

absl::StatusOr<SampleSummary> SummarizeSamples(const FluxionSamples& samples,
                                               const FluxionPredictor* predictor) {
  if (samples.samples.empty()) {
    return absl::InvalidArgumentError("there are no samples: collect some of longer documents");
  }
  if (predictor != nullptr) {
    SLUICE_RETURN_IF_ERROR(CheckFluxionPredictor(*predictor, samples.model_fingerprint));
  }
  Gathered gathered;
  for (size_t i = 0; i < samples.samples.size(); ++i) {
    SLUICE_RETURN_IF_ERROR(CheckSample(samples.samples[i], i));
    gathered.Add(samples.samples[i], predictor);
  }
  SampleSummary out = gathered.Summary();
  out.model_fingerprint = samples.model_fingerprint;
  out.tau = samples.tau;
  out.samples = std::ssize(samples.samples);
  out.predicted = predictor != nullptr;
  return out;
}

json SummaryJson(const SampleSummary& summary) {
  json heads = json::array();
  for (const HeadSummary& head : summary.heads) heads.push_back(HeadJson(head, summary.predicted));
  return {
      {"format", "sluice-fluxion-summary"},
      {"version", 1},
      {"model_fingerprint", summary.model_fingerprint},
      {"tau", summary.tau},
      {"documents", summary.documents},
      {"samples", summary.samples},
      {"streaming", summary.streaming},
      {"told", summary.predicted ? json(summary.told) : json()},
      {"right", summary.predicted ? json(summary.right) : json()},
      {"blocks", kSampleBlocks},
      {"budgets", {{"first", summary.first}, {"median", summary.median}, {"third", summary.third}}},
      {"fitted", LineJson(summary.fitted)},
      {"pinned", LineJson(summary.pinned)},
      {"heads", std::move(heads)}};
}

std::string SummaryText(const SampleSummary& summary) {
  std::string out =
      absl::StrFormat("%d samples of %d documents and %d heads, tau %g: %.1f %% stream\n",
                      summary.samples, summary.documents, summary.heads.size(), summary.tau,
                      Percent(summary.streaming, summary.samples));
  if (summary.predicted) {
    absl::StrAppendFormat(
        &out, "the predictor says that %.1f %% stream, and tells it rightly of %.1f %%\n",
        Percent(summary.told, summary.samples), Percent(summary.right, summary.samples));
  }
  if (summary.retrieval() == 0) return out;
  absl::StrAppend(&out, "\nof those that do not, the budget in % of the cpu segment:\n");
  absl::StrAppendFormat(&out, "%-16s %8s %8s %8s\n", "tokens of a block", "quarter", "median",
                        "3 quarters");
  for (size_t i = 0; i < kSizes; ++i) {
    absl::StrAppendFormat(&out, "%-16d %8.2f %8.2f %8.2f\n", kSampleBlocks[i],
                          100 * summary.first[i], 100 * summary.median[i], 100 * summary.third[i]);
  }
  const auto line = [&](const char* name, const LineSummary& of) {
    if (of.samples == 0) return;
    absl::StrAppendFormat(&out, "%-42s R2: median %.3f, %g or more for %.1f %% of %d samples\n",
                          name, of.percentiles[of.percentiles.size() / 2], kGoodLine, 100 * of.good,
                          of.samples);
  };
  absl::StrAppend(&out, "\nthe line of equation 1, by least squares:\n");
  line("bgt0 and k are free", summary.fitted);
  line("bgt0 is the budget of single tokens", summary.pinned);
  return out;
}

}  // namespace sluice
