// The prediction of Fluxion's budgets and the plan of a retrieval, as plain as their contracts
// read.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/reference.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

using Features = std::array<float, kFluxionFeatures>;

double Dot(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += double{a[d]} * double{b[d]};
  return sum;
}

double Length(const float* x, int64_t dim) { return std::sqrt(Dot(x, x, dim)); }

// Returns the length of a head's attention to sink and local tokens together. `i` is row * heads +
// head.
double ResidentLength(const PredictBudgetsParams& p, int64_t i) {
  const double sink = p.sink_lse[i], local = p.local_lse[i];
  const double none = -std::numeric_limits<double>::infinity();
  if (sink == none && local == none) return 0;
  const double largest = sink > local ? sink : local;
  const double of_sink = std::exp(sink - largest), of_local = std::exp(local - largest);
  double sum = 0;
  for (int64_t d = i * p.head_dim; d < (i + 1) * p.head_dim; ++d) {
    const double o =
        (of_sink * double{p.sink_o[d]} + of_local * double{p.local_o[d]}) / (of_sink + of_local);
    sum += o * o;
  }
  return std::sqrt(sum);
}

// A length that is not a number makes the largest one so: all heads of the row lack the feature.
double LargestResident(const PredictBudgetsParams& p, int64_t row) {
  double largest = 0;
  for (int64_t h = 0; h < p.heads; ++h) {
    const double length = ResidentLength(p, row * p.heads + h);
    if (length > largest || std::isnan(length)) largest = length;
  }
  return largest;
}

Features FeaturesOf(const PredictBudgetsParams& p, int64_t row, int64_t head, double resident) {
  const int64_t dim = p.head_dim, slot = p.slots[row], i = row * p.heads + head;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const float* const q = p.q + row * p.q_stride + head * dim;
  const float* const kv = p.anchors.kv + (slot * p.kv_heads + kv_head) * (kAnchorKvNumbers + dim);
  const float* const anchor =
      p.anchors.heads + (slot * p.heads + head) * (kAnchorHeadNumbers + dim);
  const float* const mean_key = kv + kAnchorKvNumbers;
  const float* const anchor_q = anchor + kAnchorHeadNumbers;
  const float* const anchor_lse = anchor + 4;
  const float* const anchor_lengths = anchor + 7;
  const double anchor_q_length = anchor[10];
  const float* const anchor_budgets = anchor + 11;
  const double tokens = CpuTokens(segments), length = Length(q, dim);
  const double mean = Dot(q, mean_key, dim) / (length * std::sqrt(static_cast<double>(dim)));

  Features features;
  size_t count = 0;
  const auto add = [&](double feature) { features[count++] = static_cast<float>(feature); };
  const auto add_all = [&](const float* numbers, int64_t n) {
    for (int64_t j = 0; j < n; ++j) add(double{numbers[j]});
  };
  add(p.layer);
  add(static_cast<double>(head));
  add(tokens);
  add(segments.end - tokens);
  add_all(kv, kAnchorKvNumbers);
  add(mean);
  add_all(anchor, 4);
  add(double{p.sink_lse[i]});
  add(std::log(tokens) + length * mean + length * length * double{anchor[1]} / 2);
  add(double{p.local_lse[i]});
  add_all(anchor_lse, 3);
  add(Length(p.sink_o + i * dim, dim));
  add(Length(p.local_o + i * dim, dim));
  add_all(anchor_lengths, 3);
  add(length);
  add(anchor_q_length);
  add(Dot(q, anchor_q, dim) / (length * anchor_q_length));
  add_all(anchor_budgets, kFluxionLevels);
  add(resident);
  add(double{p.anchors.resident[slot]});
  return features;
}

std::vector<double> OutputsOf(const FluxionNetwork& network, const Features& features) {
  const float* mean = network.values;
  const float* deviation = mean + kFluxionFeatures;
  const float* weights = deviation + kFluxionFeatures;
  std::vector<double> x;
  for (size_t f = 0; f < features.size(); ++f) {
    x.push_back((double{features[f]} - double{mean[f]}) / double{deviation[f]});
  }
  for (int32_t layer = 0; layer < network.layers; ++layer) {
    const int64_t in = network.widths[layer], out = network.widths[layer + 1];
    const float* const bias = weights + in * out;
    std::vector<double> y;
    for (int64_t o = 0; o < out; ++o) {
      double sum = bias[o];
      for (int64_t i = 0; i < in; ++i) {
        sum += double{weights[i * out + o]} * x[static_cast<size_t>(i)];
      }
      const bool last = layer == network.layers - 1;
      y.push_back(last ? sum : sum * 0.5 * (1 + std::erf(sum / std::sqrt(2.0))));
    }
    x = y;
    weights = bias + out;
  }
  return x;
}

bool AllFinite(const Features& features) {
  for (const float feature : features) {
    if (!std::isfinite(feature)) return false;
  }
  return true;
}

// Writes the budgets and returns whether the head streams. What float32 cannot hold is not finite.
bool Judge(const FluxionNetwork& network, const std::vector<double>& outputs, float* budgets) {
  const auto logit = static_cast<float>(outputs.back());
  const auto share = static_cast<float>(1 / (1 + std::exp(-double{logit})));
  bool streams = std::isfinite(logit) && share > network.threshold;
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    float budget;
    if (network.form == FluxionForm::kLine) {
      budget = static_cast<float>(outputs[0] + outputs[1] * std::log2(LevelTokens(level)));
    } else {
      const double log = outputs[static_cast<size_t>(level)];
      budget = std::isfinite(static_cast<float>(log)) ? static_cast<float>(std::exp2(log))
                                                      : std::numeric_limits<float>::infinity();
    }
    const bool finite = std::isfinite(budget);
    streams = streams && finite;
    budgets[level] = !finite || budget > 1 ? 1 : budget < 0 ? 0 : budget;
  }
  return streams;
}

// Returns the volume of a list's retrieval at a level, in tokens.
int64_t VolumeOf(const PlanRetrievalParams& p, int64_t list, int32_t level) {
  const int64_t row = list / p.kv_heads, group = p.heads / p.kv_heads;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  int64_t volume = CpuBlocks(segments, level);
  for (int64_t g = 0; g < group; ++g) {
    const int64_t i = row * p.heads + list % p.kv_heads * group + g;
    if (p.streaming[i] != 0) continue;
    const float budget = p.budgets[i * kFluxionLevels + level];
    volume += int64_t{LevelTokens(level)} * BlocksOfShare(segments, level, budget);
  }
  return volume;
}

bool HasLevel(const PlanRetrievalParams& p, int64_t list) {
  const int64_t row = list / p.kv_heads, group = p.heads / p.kv_heads;
  if (p.slots[row] < 0 || CpuTokens(SegmentsOf(p.positions[row])) == 0) return false;
  for (int64_t g = 0; g < group; ++g) {
    if (p.streaming[row * p.heads + list % p.kv_heads * group + g] == 0) return true;
  }
  return false;
}

}  // namespace

void PredictBudgets(const PredictBudgetsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    if (p.slots[row] < 0) continue;
    const double resident = LargestResident(p, row);
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t i = row * p.heads + h;
      const Features features = FeaturesOf(p, row, h, resident);
      for (size_t f = 0; p.features != nullptr && f < features.size(); ++f) {
        p.features[i * kFluxionFeatures + static_cast<int64_t>(f)] = features[f];
      }
      float* const budgets = p.budgets + i * kFluxionLevels;
      p.streaming[i] = 0;
      if (AllFinite(features)) {
        p.streaming[i] = Judge(p.network, OutputsOf(p.network, features), budgets) ? 1 : 0;
      } else {
        for (int32_t level = 0; level < kFluxionLevels; ++level) budgets[level] = 1;
      }
    }
  }
}

void PlanRetrieval(const PlanRetrievalParams& p, Worker worker) {
  const int64_t group = p.heads / p.kv_heads;
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t row = list / p.kv_heads;
    int32_t best = -1;
    int64_t least = 0;
    for (int32_t level = p.first_level; HasLevel(p, list) && level <= p.last_level; ++level) {
      const int64_t volume = VolumeOf(p, list, level);
      if (best >= 0 && volume >= least) continue;
      best = level;
      least = volume;
    }
    p.levels[list] = best;
    p.volumes[list] = static_cast<int32_t>(least);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t i = row * p.heads + list % p.kv_heads * group + g;
      p.blocks[i] = best < 0 || p.streaming[i] != 0
                        ? 0
                        : BlocksOfShare(SegmentsOf(p.positions[row]), best,
                                        p.budgets[i * kFluxionLevels + best]);
    }
  }
}

}  // namespace sluice::kernels::reference
