#include "src/profile/fluxion/predictor_check.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

namespace sluice {
namespace {

using Head = FluxionPredictor::Head;
using kernels::kFluxionLevels;
using kernels::LevelTokens;

constexpr Head kDense = {{1, 1, 1, 1}, false};

const GroupAttention& GroupOf(const LayerRow& row, size_t head, int64_t* g) {
  const int64_t group = row.groups[0].group();
  *g = static_cast<int64_t>(head) % group;
  return row.groups[head / static_cast<size_t>(group)];
}

// Returns the budgets that `budget(level)` gives. A head that needs nothing at any level streams.
template <typename Budget>
Head HeadBy(const Budget& budget) {
  Head head = kDense;
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    head.budgets[static_cast<size_t>(level)] = static_cast<float>(budget(level));
  }
  head.streaming =
      std::all_of(head.budgets.begin(), head.budgets.end(), [](float share) { return share == 0; });
  return head;
}

// A level and the blocks that each head selects there.
struct Plan {
  int32_t level = -1;
  std::vector<int64_t> blocks;
  int64_t volume = 0;
};
Plan PlanAt(const kernels::FluxionSegments& segments, absl::Span<const Head> heads, int32_t level) {
  Plan plan{level, {}, kernels::CpuBlocks(segments, level)};
  for (const Head& head : heads) {
    const float share = head.budgets[static_cast<size_t>(level)];
    plan.blocks.push_back(head.streaming ? 0 : kernels::BlocksOfShare(segments, level, share));
    plan.volume += plan.blocks.back() * LevelTokens(level);
  }
  return plan;
}
Plan PlanOf(const kernels::FluxionSegments& segments, absl::Span<const Head> heads,
            int32_t fixed_level) {
  const auto streams = [](const Head& head) { return head.streaming; };
  if (std::all_of(heads.begin(), heads.end(), streams)) {
    return {-1, std::vector<int64_t>(heads.size()), 0};
  }
  if (fixed_level >= 0) return PlanAt(segments, heads, fixed_level);
  Plan best = PlanAt(segments, heads, 0);
  for (int32_t level = 1; level < kFluxionLevels; ++level) {
    Plan plan = PlanAt(segments, heads, level);
    if (plan.volume < best.volume) best = std::move(plan);
  }
  return best;
}

// Adds a group to the sums and returns what comes of its selection.
GroupAttention::Outcome AddGroup(const GroupAttention& of, absl::Span<const Head> heads,
                                 double bound, int32_t fixed_level, SourceSums* sums) {
  const Plan plan = PlanOf(of.segments(), heads, fixed_level);
  GroupAttention::Outcome outcome = of.Select(std::max(plan.level, 0), plan.blocks);
  ++sums->groups;
  sums->heads += of.group();
  for (const double error : outcome.errors) sums->violations += error > bound ? 1 : 0;
  if (plan.level < 0) return outcome;
  ++sums->tasks;
  ++sums->levels[static_cast<size_t>(plan.level)];
  sums->digests += of.DigestTokens(plan.level);
  sums->tokens += outcome.tokens;
  sums->volume += plan.volume;
  return outcome;
}

// Returns the squared length of the output of all heads.
double SquaredOutput(const LayerRow& row) {
  double sum = 0;
  for (const GroupAttention& of : row.groups) {
    for (int64_t g = 0; g < of.group(); ++g) sum += std::pow(of.whole(g).Length(), 2);
  }
  return sum;
}

}  // namespace

HeadTable::HeadTable(absl::Span<const FluxionSample> samples, double quantile) {
  struct Seen {
    std::array<std::vector<float>, kFluxionLevels> budgets;
    int64_t streaming = 0, all = 0;
  };
  std::vector<std::vector<Seen>> seen;
  for (const FluxionSample& sample : samples) {
    const auto layer = static_cast<size_t>(sample.features[0]);
    const auto head = static_cast<size_t>(sample.features[1]);
    if (seen.size() <= layer) seen.resize(layer + 1);
    if (seen[layer].size() <= head) seen[layer].resize(head + 1);
    Seen& of = seen[layer][head];
    ++of.all;
    of.streaming += sample.streaming ? 1 : 0;
    if (sample.streaming) continue;
    for (size_t level = 0; level < of.budgets.size(); ++level) {
      of.budgets[level].push_back(sample.budgets[level + 1]);
    }
  }
  for (std::vector<Seen>& layer : seen) {
    std::vector<Head>& heads = heads_.emplace_back();
    for (Seen& of : layer) {
      Head head = kDense;
      head.streaming = 2 * of.streaming > of.all;
      for (size_t level = 0; level < of.budgets.size(); ++level) {
        std::vector<float>& budgets = of.budgets[level];
        if (budgets.empty()) continue;
        std::sort(budgets.begin(), budgets.end());
        const auto at = static_cast<size_t>(quantile * static_cast<double>(budgets.size()));
        head.budgets[level] = budgets[std::min(at, budgets.size() - 1)];
      }
      heads.push_back(head);
    }
  }
}

Head HeadTable::Tell(int64_t layer, size_t head) const {
  const auto at = static_cast<size_t>(layer);
  return at < heads_.size() && head < heads_[at].size() ? heads_[at][head] : kDense;
}

BudgetSource FixedSource(int32_t level, double share) {
  const auto of = static_cast<float>(share);
  return {"fixed (" + std::to_string(LevelTokens(level)) + ", " +
              std::to_string(share).substr(0, 4) + ")",
          [of](const LayerRow&, size_t) {
            return Head{{of, of, of, of}, false};
          },
          level};
}

BudgetSource OracleSource() {
  return {"oracle", [](const LayerRow& row, size_t head) {
            const FluxionSample& sample = row.heads[head];
            Head out = kDense;
            std::copy_n(sample.budgets.begin() + 1, out.budgets.size(), out.budgets.begin());
            out.streaming = sample.streaming;
            return out;
          }};
}

BudgetSource AnchorSource() {
  return {"anchor's labels", [](const LayerRow& row, size_t head) {
            constexpr size_t kBudgets = 35;  // the feature
            Head out = kDense;
            std::copy_n(row.heads[head].features.begin() + kBudgets, out.budgets.size(),
                        out.budgets.begin());
            out.streaming = row.anchor_streaming[head] != 0;
            return out;
          }};
}

BudgetSource OwnOutputSource(double share) {
  return {"own output (" + std::to_string(share).substr(0, 4) + ")",
          [share](const LayerRow& row, size_t head) {
            int64_t g = 0;
            const GroupAttention& of = GroupOf(row, head, &g);
            const double bound = share * of.whole(g).Length();
            Head out = HeadBy([&](int32_t level) { return of.Budget(g, level, bound); });
            out.streaming = of.ResidentError(g) <= bound;
            return out;
          }};
}

BudgetSource ScoreSource(double share) {
  return {"score (" + std::to_string(share).substr(0, 4) + ")",
          [share](const LayerRow& row, size_t head) {
            int64_t g = 0;
            const GroupAttention& of = GroupOf(row, head, &g);
            return HeadBy([&](int32_t level) { return of.ScoreBudget(g, level, share); });
          }};
}

BudgetSource TauSource(double tau, int32_t level) {
  return {"oracle (" + std::to_string(tau).substr(0, 4) + ")",
          [tau, level](const LayerRow& row, size_t head) {
            int64_t g = 0;
            const GroupAttention& of = GroupOf(row, head, &g);
            const double bound = tau * row.largest;
            Head out = kDense;
            out.streaming = of.ResidentError(g) <= bound;
            if (!out.streaming) {
              out.budgets[static_cast<size_t>(level)] =
                  static_cast<float>(of.Budget(g, level, bound));
            }
            return out;
          },
          level};
}

BudgetSource TableSource(const HeadTable* table) {
  return {"table of heads",
          [table](const LayerRow& row, size_t head) { return table->Tell(row.layer, head); }};
}

BudgetSource PredictorSource(const std::string& name, const FluxionPredictor* predictor) {
  return {name, [predictor](const LayerRow& row, size_t head) {
            return predictor->Predict(row.heads[head].features);
          }};
}

void SourceSums::Add(const SourceSums& more) {
  groups += more.groups;
  tasks += more.tasks;
  digests += more.digests;
  tokens += more.tokens;
  volume += more.volume;
  heads += more.heads;
  violations += more.violations;
  rows += more.rows;
  row_errors += more.row_errors;
  streaming_right += more.streaming_right;
  streaming_told += more.streaming_told;
  streaming_needed += more.streaming_needed;
  for (size_t level = 0; level < levels.size(); ++level) levels[level] += more.levels[level];
}

SourceSums MeasureSource(const BudgetSource& source, const LayerRow& row,
                         std::vector<double>* outputs) {
  const auto group = static_cast<size_t>(row.groups[0].group());
  SourceSums sums;
  std::vector<Head> heads;
  for (size_t head = 0; head < row.heads.size(); ++head) {
    heads.push_back(source.tell(row, head));
    const bool needed = row.heads[head].streaming, told = heads.back().streaming;
    sums.streaming_right += needed == told ? 1 : 0;
    sums.streaming_told += told ? 1 : 0;
    sums.streaming_needed += needed ? 1 : 0;
  }
  double error = 0;
  for (size_t kv = 0; kv < row.groups.size(); ++kv) {
    const GroupAttention::Outcome outcome =
        AddGroup(row.groups[kv], absl::MakeConstSpan(heads).subspan(kv * group, group), row.bound,
                 source.level, &sums);
    for (const double off : outcome.errors) error += off * off;
    if (outputs == nullptr) continue;
    outputs->insert(outputs->end(), outcome.outputs.begin(), outcome.outputs.end());
  }
  const double output = SquaredOutput(row);
  sums.rows = 1;
  sums.row_errors = output > 0 ? std::sqrt(error / output) : 0;
  return sums;
}

PredictorCheck::PredictorCheck(std::vector<BudgetSource> sources)
    : sources_(std::move(sources)), sums_(sources_.size()) {}

void PredictorCheck::Add(const LayerRow& row) {
  std::vector<SourceSums> added;
  for (const BudgetSource& source : sources_) added.push_back(MeasureSource(source, row, nullptr));
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < added.size(); ++i) sums_[i].Add(added[i]);
  for (const GroupAttention& of : row.groups) cpu_tokens_ += kernels::CpuTokens(of.segments());
}

nlohmann::json CheckJson(const PredictorCheck& check, const std::string& model_fingerprint,
                         double tau) {
  nlohmann::json sources = nlohmann::json::array();
  for (size_t i = 0; i < check.sources().size(); ++i) {
    const SourceSums& of = check.sums()[i];
    sources.push_back({{"name", check.sources()[i].name},
                       {"groups", of.groups},
                       {"tasks", of.tasks},
                       {"digests", of.digests},
                       {"tokens", of.tokens},
                       {"bytes", of.bytes()},
                       {"volume", of.volume},
                       {"heads", of.heads},
                       {"violations", of.violations},
                       {"row_error", of.row_errors / static_cast<double>(of.rows)},
                       {"streaming_needed", of.streaming_needed},
                       {"streaming_told", of.streaming_told},
                       {"streaming_right", of.streaming_right},
                       {"tasks_by_level", of.levels}});
  }
  return {{"format", "sluice-fluxion-check"},       {"version", 1},
          {"model_fingerprint", model_fingerprint}, {"tau", tau},
          {"cpu_tokens", check.cpu_tokens()},       {"sources", std::move(sources)}};
}

}  // namespace sluice
