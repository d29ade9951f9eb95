#include "src/profile/fluxion/figures.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/bench/harness/policy_run.h"

namespace sluice {
namespace {

using bench::Percentile;
using nlohmann::json;
using HeadList = std::vector<const HeadFigure*>;

// A head's part of the layer's largest output up to which it counts to a bin of figure 4.
constexpr std::array<double, 4> kLengthBins = {0.1, 0.25, 0.5, 1};

std::vector<BudgetSource> TauSources() {
  std::vector<BudgetSource> out = {FixedSource(0, kFixedShare)};
  for (const double tau : kTaus) out.push_back(TauSource(tau, 0));
  return out;
}

template <typename Value>
std::vector<double> ValuesOf(const HeadList& heads, const Value& value) {
  std::vector<double> out;
  for (const HeadFigure* head : heads) {
    const double of = std::invoke(value, *head);
    if (!std::isnan(of)) out.push_back(of);
  }
  return out;
}

double MeanOf(const std::vector<double>& values) { return MomentsOf(values).mean; }

double Share(const std::vector<double>& values, const std::function<bool(double)>& counts) {
  const auto count = std::count_if(values.begin(), values.end(), counts);
  return values.empty() ? 0 : static_cast<double>(count) / static_cast<double>(values.size());
}
double LargeErrors(const std::vector<double>& errors) {
  return Share(errors, [](double error) { return error > kLargeError; });
}

// Returns the least value, the quartiles and the largest value.
json Box(const std::vector<double>& values) {
  json out = json::array();
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) out.push_back(Percentile(values, share));
  return out;
}

std::vector<double> Errors(const HeadList& heads, HeadFigure::Kept HeadFigure::*kept, size_t i) {
  return ValuesOf(heads, [&](const HeadFigure& head) { return (head.*kept).errors[i]; });
}

json KeptJson(const HeadList& heads, HeadFigure::Kept HeadFigure::*kept) {
  json out = json::array();
  for (size_t i = 0; i < kKeptScores.size(); ++i) {
    const std::vector<double> errors = Errors(heads, kept, i);
    const auto tokens = [&](const HeadFigure& head) { return (head.*kept).tokens[i]; };
    json percentiles = json::array();
    for (int p = 0; p <= 100; ++p) percentiles.push_back(Percentile(errors, p / 100.0));
    out.push_back({{"share", kKeptScores[i]},
                   {"tokens", MeanOf(ValuesOf(heads, tokens))},
                   {"large", LargeErrors(errors)},
                   {"percentiles", std::move(percentiles)}});
  }
  return out;
}

double ExcessKurtosis(const HeadFigure& head) { return head.z.moments.kurtosis - 3; }
double Skewness(const HeadFigure& head) { return head.z.moments.skewness; }
double LargestGap(const HeadFigure& head) { return head.z.largest_gap; }

size_t Index95() {
  return static_cast<size_t>(std::find(kKeptScores.begin(), kKeptScores.end(), 0.95) -
                             kKeptScores.begin());
}

json LayerJson(int64_t layer, const HeadList& heads, const ValueLengths& values) {
  return {{"layer", layer},
          {"value_lengths",
           {{"first", values.first}, {"sink", values.sink}, {"others", values.others}}},
          {"sink_scores", Box(ValuesOf(heads, &HeadFigure::sink_score))},
          {"large_errors",
           {{"all", LargeErrors(Errors(heads, &HeadFigure::all, Index95()))},
            {"beside", LargeErrors(Errors(heads, &HeadFigure::beside, Index95()))}}},
          {"skewness", Box(ValuesOf(heads, Skewness))},
          {"excess_kurtosis", Box(ValuesOf(heads, ExcessKurtosis))},
          {"largest_gap", Box(ValuesOf(heads, LargestGap))},
          {"lse_error", Box(ValuesOf(heads, &HeadFigure::lse_error))}};
}

// Returns budgets of heads by the part that they have of the layer's largest output.
json ContributionJson(const HeadList& heads) {
  json out = json::array();
  double from = 0;
  for (const double to : kLengthBins) {
    HeadList in;
    for (const HeadFigure* head : heads) {
      const double of = head->relative_length;
      if ((of > from || from == 0) && (of <= to || to == 1)) in.push_back(head);
    }
    out.push_back({{"from", from},
                   {"to", to},
                   {"samples", in.size()},
                   {"own_budget", MeanOf(ValuesOf(in, &HeadFigure::own_budget))},
                   {"budget", MeanOf(ValuesOf(in, &HeadFigure::budget))}});
    from = to;
  }
  return out;
}

// Returns one row of a layer: budgets and outputs of its heads, and one head's q k.
json ExampleJson(const HeadList& layer) {
  HeadList by_gap;
  for (const HeadFigure* head : layer) {
    if (!std::isnan(head->z.largest_gap)) by_gap.push_back(head);
  }
  if (by_gap.empty()) return nullptr;
  std::stable_sort(by_gap.begin(), by_gap.end(), [](const HeadFigure* a, const HeadFigure* b) {
    return a->z.largest_gap < b->z.largest_gap;
  });
  const HeadFigure& typical = *by_gap[by_gap.size() / 2];
  json heads = json::array(), normal = json::array();
  for (const HeadFigure* head : layer) {
    if (head->document != typical.document || head->position != typical.position) continue;
    heads.push_back({{"head", head->head},
                     {"own_budget", head->own_budget},
                     {"budget", head->budget},
                     {"output", head->o}});
  }
  for (int i = 1; i <= kQqPoints; ++i) normal.push_back(NormalQuantile(i / (kQqPoints + 1.0)));
  return {{"layer", typical.layer},
          {"document", typical.document},
          {"position", typical.position},
          {"heads", std::move(heads)},
          {"z",
           {{"head", typical.head},
            {"mean", typical.z.moments.mean},
            {"deviation", std::sqrt(typical.z.moments.variance)},
            {"skewness", Skewness(typical)},
            {"excess_kurtosis", ExcessKurtosis(typical)},
            {"largest_gap", LargestGap(typical)},
            {"histogram_end", kHistogramEnd},
            {"histogram", typical.z.histogram},
            {"quantiles", typical.z.quantiles},
            {"normal_quantiles", std::move(normal)}}}};
}

double Ratio(int64_t part, int64_t all) {
  return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
}

json BudgetJson(const SourceSums& of, int64_t cpu_tokens) {
  return {{"read", Ratio(of.bytes(), cpu_tokens)},
          {"tokens", Ratio(of.tokens, cpu_tokens)},
          {"streaming", Ratio(of.streaming_told, of.heads)},
          {"row_error", of.row_errors / static_cast<double>(std::max<int64_t>(of.rows, 1))}};
}

json QualityJson(const SourceQuality& of) {
  return {{"rows", of.distance.steps()},
          {"top1", of.distance.top1_agreement()},
          {"kl", of.distance.mean_kl()},
          {"perplexity_change", of.distance.perplexity_change()},
          {"budget", BudgetJson(of.sums, of.cpu_tokens)}};
}

std::map<int64_t, HeadList> ByLayer(const std::vector<HeadFigure>& heads) {
  std::map<int64_t, HeadList> out;
  for (const HeadFigure& head : heads) out[head.layer].push_back(&head);
  return out;
}

HeadList All(const std::vector<HeadFigure>& heads) {
  HeadList out;
  for (const HeadFigure& head : heads) out.push_back(&head);
  return out;
}

}  // namespace

FluxionFigures::FluxionFigures() : taus_(TauSources()) {}

void FluxionFigures::Add(const LayerRow& row) {
  std::vector<HeadFigure> heads;
  for (size_t head = 0; head < row.heads.size(); ++head) {
    heads.push_back(MeasureHeadFigure(row, head));
  }
  taus_.Add(row);
  const std::lock_guard lock(mutex_);
  for (HeadFigure& head : heads) heads_.push_back(std::move(head));
  for (const GroupAttention& group : row.groups) values_[row.layer].Add(group);
}

std::vector<HeadFigure> FluxionFigures::Sorted() const {
  const std::lock_guard lock(mutex_);
  std::vector<HeadFigure> out = heads_;
  const auto key = [](const HeadFigure& of) {
    return std::tuple(of.layer, of.document, of.position, of.head);
  };
  std::sort(out.begin(), out.end(),
            [&](const HeadFigure& a, const HeadFigure& b) { return key(a) < key(b); });
  return out;
}

json FluxionFigures::Json(const std::string& model_fingerprint, double tau) const {
  const std::vector<HeadFigure> heads = Sorted();
  const HeadList all = All(heads);
  const std::map<int64_t, HeadList> layers = ByLayer(heads);
  json by_layer = json::array(), examples = json::array(), taus = json::array();
  std::set<std::pair<int32_t, int64_t>> rows;
  for (const HeadFigure& head : heads) rows.emplace(head.document, head.position);
  for (const auto& [layer, of] : layers) {
    by_layer.push_back(LayerJson(layer, of, values_.at(layer)));
    const auto later = static_cast<int64_t>(layers.size()) * 5 / 8;
    if (layer == 0 || layer == later) examples.push_back(ExampleJson(of));
  }
  for (size_t i = 0; i < taus_.sums().size(); ++i) {
    json of = BudgetJson(taus_.sums()[i], taus_.cpu_tokens());
    of["tau"] = i == 0 ? json() : json(kTaus[i - 1]);
    of["quality"] = quality_.empty() ? json() : QualityJson(quality_[i]);
    taus.push_back(std::move(of));
  }
  json fixed = taus[0];
  taus.erase(0);
  return {
      {"format", "sluice-fluxion-figures"},
      {"version", 1},
      {"model_fingerprint", model_fingerprint},
      {"tau", tau},
      {"rows", rows.size()},
      {"samples", heads.size()},
      {"large_error", kLargeError},
      {"own_deviation", kOwnDeviation},
      {"scores",
       {{"all", KeptJson(all, &HeadFigure::all)}, {"beside", KeptJson(all, &HeadFigure::beside)}}},
      {"layers", std::move(by_layer)},
      {"contribution", ContributionJson(all)},
      {"examples", std::move(examples)},
      {"fixed", std::move(fixed)},
      {"taus", std::move(taus)}};
}

std::string FluxionFigures::Text() const {
  const std::vector<HeadFigure> heads = Sorted();
  const HeadList all = All(heads);
  std::string out = absl::StrFormat(
      "%d heads at rows. Of those that keep a share of their scores, %% that err by more than %g "
      "%%\n(in brackets, the tokens that they keep, in %%):\n%-22s %16s %16s\n",
      heads.size(), 100 * kLargeError, "share of the scores", "of all tokens", "default set, more");
  for (size_t i = 0; i < kKeptScores.size(); ++i) {
    absl::StrAppendFormat(&out, "%-22g", kKeptScores[i]);
    for (const auto kept : {&HeadFigure::all, &HeadFigure::beside}) {
      const auto tokens = [&](const HeadFigure& head) { return (head.*kept).tokens[i]; };
      absl::StrAppendFormat(&out, " %8.2f (%5.2f)", 100 * LargeErrors(Errors(all, kept, i)),
                            100 * MeanOf(ValuesOf(all, tokens)));
    }
    out += '\n';
  }
  ValueLengths mean;
  for (const auto& [layer, of] : values_) {
    mean.first += of.first / static_cast<double>(values_.size());
    mean.sink += of.sink / static_cast<double>(values_.size());
    mean.others += of.others / static_cast<double>(values_.size());
  }
  absl::StrAppendFormat(&out,
                        "\nvalues' mean length over layers: %.2f of the first token, %.2f of the "
                        "sink, %.2f of others\n",
                        mean.first, mean.sink, mean.others);
  const auto median = [&](const auto& value) { return Percentile(ValuesOf(all, value), 0.5); };
  absl::StrAppendFormat(
      &out,
      "medians: the sink has %.1f %% of the scores; z has a skewness of %.2f, an excess kurtosis "
      "of %.2f\nand a Q-Q gap of %.2f deviations; normal scores miss the log-sum-exp by %.2f\n",
      100 * median(&HeadFigure::sink_score), median(Skewness), median(ExcessKurtosis),
      median(LargestGap), median([](const HeadFigure& head) { return std::abs(head.lse_error); }));
  absl::StrAppendFormat(&out, "\n%-22s %9s %9s %9s", "tau of each head", "read", "streaming",
                        "error");
  if (!quality_.empty()) absl::StrAppendFormat(&out, " %9s %9s %9s", "top-1", "KL", "perplexity");
  absl::StrAppend(&out, "   (in %, but KL; read: K, V, digests of the cpu segment)\n");
  for (size_t i = 0; i < taus_.sums().size(); ++i) {
    const json of = BudgetJson(taus_.sums()[i], taus_.cpu_tokens());
    absl::StrAppendFormat(&out, "%-22s %9.2f %9.1f %9.2f",
                          i == 0 ? taus_.sources()[0].name : absl::StrFormat("%g", kTaus[i - 1]),
                          100 * of["read"].get<double>(), 100 * of["streaming"].get<double>(),
                          100 * of["row_error"].get<double>());
    if (!quality_.empty()) {
      const bench::Distance& distance = quality_[i].distance;
      absl::StrAppendFormat(&out, " %9.2f %9.5f %+9.2f", 100 * distance.top1_agreement(),
                            distance.mean_kl(), 100 * distance.perplexity_change());
    }
    out += '\n';
  }
  return out;
}

}  // namespace sluice
