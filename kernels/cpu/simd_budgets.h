// The prediction of Fluxion's budgets for any path (`S`: see simd_math.h). Query heads are split
// over workers. The networks of a few heads run side by side, so that weights are read once for all
// of them; every output is one chain over its inputs in order, whatever the heads beside it.
#pragma once

#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int64_t kBudgetHeads = 8;

// Numbers of the heads that run side by side: features, or what a layer gives.
struct BudgetValues {
  alignas(64) float of[kBudgetHeads][kFluxionMostWidth];
};

// Returns 1 - erf(x) with a relative error below 1.2e-7 and that of Exp, for x >= 0 (Numerical
// Recipes in C, section 6.2). It is 0 where it would be less than the smallest normal float.
template <class S>
inline typename S::F Erfc(typename S::F x) {
  using F = typename S::F;
  constexpr float kTerms[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                              0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const F one = S::Set1(1.0f);
  const F t = S::Div(one, S::Fma(x, S::Set1(0.5f), one));
  F sum = S::Set1(0.17087277f);
  for (const float term : kTerms) sum = S::Fma(sum, t, S::Set1(term));
  return S::Mul(t, Exp<S>(S::Sub(sum, S::Mul(x, x))));
}

// Applies GELU in place: x Phi(x) = max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2. Elements behind
// `count`, up to a multiple of the width, change too.
template <class S>
void Gelu(float* x, int64_t count) {
  using F = typename S::F;
  const F zero = S::Set1(0.0f);
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const F v = S::Load(x + i), size = S::Max(S::Sub(zero, v), v);
    const F tail =
        S::Mul(S::Mul(size, S::Set1(0.5f)), Erfc<S>(S::Mul(size, S::Set1(0.707106781186547524f))));
    S::Store(x + i, S::Sub(S::Max(zero, v), tail));
  }
}

// Computes columns [0, kVectors * kWidth) of a layer, whose weights are [in][out], for kHeads
// heads.
template <class S, int kHeads, int kVectors>
inline void LayerColumns(const float (*x)[kFluxionMostWidth], const float* weights,
                         const float* bias, int64_t in, int64_t out, float (*y)[kFluxionMostWidth],
                         int64_t column) {
  using F = typename S::F;
  F sums[kHeads][kVectors];
  for (auto& of_head : sums) {
    for (int v = 0; v < kVectors; ++v) of_head[v] = S::Load(bias + column + v * S::kWidth);
  }
  for (int64_t i = 0; i < in; ++i) {
    F w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = S::Load(weights + i * out + column + v * S::kWidth);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const F element = S::Set1(x[h][i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[h][v] = S::Fma(element, w[v], sums[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) S::Store(y[h] + column + v * S::kWidth, sums[h][v]);
  }
}

// Computes y = W x + b for kHeads heads. How a column is summed depends on the layer's shape alone.
template <class S, int kHeads>
void Layer(const float (*x)[kFluxionMostWidth], const float* weights, const float* bias, int64_t in,
           int64_t out, float (*y)[kFluxionMostWidth]) {
  constexpr int kVectors = 2;
  int64_t column = 0;
  for (; column + kVectors * S::kWidth <= out; column += kVectors * S::kWidth) {
    LayerColumns<S, kHeads, kVectors>(x, weights, bias, in, out, y, column);
  }
  for (; column + S::kWidth <= out; column += S::kWidth) {
    LayerColumns<S, kHeads, 1>(x, weights, bias, in, out, y, column);
  }
  for (; column < out; ++column) {
    for (int h = 0; h < kHeads; ++h) {
      float sum = bias[column];
      for (int64_t i = 0; i < in; ++i) sum += x[h][i] * weights[i * out + column];
      y[h][column] = sum;
    }
  }
}

// Runs the network of `heads` heads on their features in `a`, and returns which of the two has the
// outputs.
template <class S>
const BudgetValues& RunNetwork(const FluxionNetwork& network, int64_t heads, BudgetValues& a,
                               BudgetValues& b) {
  constexpr int64_t kTile = 4;
  const float* const mean = network.values;
  const float* const deviation = mean + kFluxionFeatures;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t f = 0; f < kFluxionFeatures; ++f) {
      a.of[h][f] = (a.of[h][f] - mean[f]) / deviation[f];
    }
  }
  const float* weights = deviation + kFluxionFeatures;
  BudgetValues *from = &a, *to = &b;
  for (int32_t layer = 0; layer < network.layers; ++layer) {
    const int64_t in = network.widths[layer], out = network.widths[layer + 1];
    const float* const bias = weights + in * out;
    int64_t h = 0;
    for (; h + kTile <= heads; h += kTile) {
      Layer<S, kTile>(from->of + h, weights, bias, in, out, to->of + h);
    }
    for (; h < heads; ++h) Layer<S, 1>(from->of + h, weights, bias, in, out, to->of + h);
    if (layer + 1 < network.layers) {
      for (h = 0; h < heads; ++h) Gelu<S>(to->of[h], out);
    }
    weights = bias + out;
    BudgetValues* const next = from;
    from = to;
    to = next;
  }
  return *from;
}

inline bool IsFinite(float x) { return __builtin_fabsf(x) <= __FLT_MAX__; }

// Writes a head's budgets from the outputs of its network, and returns whether it streams. An
// infinite logit is a sum that went wrong, so the head does not stream.
inline bool JudgeHead(const FluxionNetwork& network, const float* outputs, float* budgets) {
  const bool line = network.form == FluxionForm::kLine;
  const float logit = outputs[line ? 2 : kFluxionLevels];
  bool streams = IsFinite(logit) && 1.0f / (1.0f + __builtin_expf(-logit)) > network.threshold;
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    const float budget = line ? outputs[0] + outputs[1] * static_cast<float>(4 + level)
                              : __builtin_exp2f(outputs[level]);
    const bool finite = IsFinite(budget) && (line || IsFinite(outputs[level]));
    streams = streams && finite;
    budgets[level] = !finite || budget > 1 ? 1.0f : budget < 0 ? 0.0f : budget;
  }
  return streams;
}

template <class S>
float BudgetDot(const float* a, const float* b, int64_t dim) {
  typename S::F sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; d += S::kWidth) sum = S::Fma(S::Load(a + d), S::Load(b + d), sum);
  return S::Sum(sum);
}

// Returns the length of attention to sink and local tokens together, of head i (row * heads +
// head).
template <class S>
float ResidentLength(const PredictBudgetsParams& p, int64_t i) {
  using F = typename S::F;
  const float sink = p.sink_lse[i], local = p.local_lse[i];
  if (sink == kNegativeInfinity && local == kNegativeInfinity) return 0;
  const float largest = sink > local ? sink : local;
  const float of_sink = __builtin_expf(sink - largest), of_local = __builtin_expf(local - largest);
  const F sink_share = S::Set1(of_sink / (of_sink + of_local));
  const F local_share = S::Set1(of_local / (of_sink + of_local));
  F sum = S::Set1(0.0f);
  for (int64_t d = i * p.head_dim; d < (i + 1) * p.head_dim; d += S::kWidth) {
    const F of_local_o = S::Mul(local_share, S::Load(p.local_o + d));
    const F o = S::Fma(sink_share, S::Load(p.sink_o + d), of_local_o);
    sum = S::Fma(o, o, sum);
  }
  return __builtin_sqrtf(S::Sum(sum));
}

// A length that is not a number makes the largest one so: all heads of the row lack the feature.
template <class S>
float LargestResident(const PredictBudgetsParams& p, int64_t row) {
  float largest = 0;
  for (int64_t i = row * p.heads; i < (row + 1) * p.heads; ++i) {
    const float length = ResidentLength<S>(p, i);
    if (length > largest || length != length) largest = length;
  }
  return largest;
}

inline void CopyFeatures(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Writes the features of head i.
template <class S>
void FeaturesOf(const PredictBudgetsParams& p, int64_t i, float resident, float* f) {
  const int64_t row = i / p.heads, head = i % p.heads, dim = p.head_dim, slot = p.slots[row];
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const float* const q = p.q + row * p.q_stride + head * dim;
  const float* const kv = p.anchors.kv + (slot * p.kv_heads + kv_head) * (kAnchorKvNumbers + dim);
  const float* const anchor =
      p.anchors.heads + (slot * p.heads + head) * (kAnchorHeadNumbers + dim);
  const float* const sink_o = p.sink_o + i * dim;
  const float* const local_o = p.local_o + i * dim;
  const auto tokens = static_cast<float>(CpuTokens(segments));
  const float length = __builtin_sqrtf(BudgetDot<S>(q, q, dim));
  f[0] = static_cast<float>(p.layer);
  f[1] = static_cast<float>(head);
  f[2] = tokens;
  f[3] = static_cast<float>(segments.end - CpuTokens(segments));
  CopyFeatures(kv, kAnchorKvNumbers, f + 4);
  f[16] = BudgetDot<S>(q, kv + kAnchorKvNumbers, dim) /
          (length * __builtin_sqrtf(static_cast<float>(dim)));
  CopyFeatures(anchor, 4, f + 17);
  f[21] = p.sink_lse[i];
  f[22] = __builtin_logf(tokens) + length * f[16] + length * length * f[18] * 0.5f;
  f[23] = p.local_lse[i];
  CopyFeatures(anchor + 4, 3, f + 24);
  f[27] = __builtin_sqrtf(BudgetDot<S>(sink_o, sink_o, dim));
  f[28] = __builtin_sqrtf(BudgetDot<S>(local_o, local_o, dim));
  CopyFeatures(anchor + 7, 3, f + 29);
  f[32] = length;
  f[33] = anchor[10];
  f[34] = BudgetDot<S>(q, anchor + kAnchorHeadNumbers, dim) / (length * f[33]);
  CopyFeatures(anchor + 11, kFluxionLevels, f + 35);
  f[39] = resident;
  f[40] = p.anchors.resident[slot];
}

// Predicts for heads [begin, end) of one row.
template <class S>
void PredictHeads(const PredictBudgetsParams& p, int64_t begin, int64_t end, float resident,
                  BudgetValues& a, BudgetValues& b) {
  bool finite[kBudgetHeads];
  for (int64_t i = begin; i < end; ++i) {
    float* const features = a.of[i - begin];
    FeaturesOf<S>(p, i, resident, features);
    if (p.features != nullptr) {
      CopyFeatures(features, kFluxionFeatures, p.features + i * kFluxionFeatures);
    }
    finite[i - begin] = true;
    for (int64_t f = 0; f < kFluxionFeatures; ++f) finite[i - begin] &= IsFinite(features[f]);
  }
  const BudgetValues& outputs = RunNetwork<S>(p.network, end - begin, a, b);
  for (int64_t i = begin; i < end; ++i) {
    float* const budgets = p.budgets + i * kFluxionLevels;
    p.streaming[i] = 0;
    if (finite[i - begin]) {
      p.streaming[i] = JudgeHead(p.network, outputs.of[i - begin], budgets) ? 1 : 0;
    } else {
      for (int32_t level = 0; level < kFluxionLevels; ++level) budgets[level] = 1;
    }
  }
}

inline void CheckBudgets(const PredictBudgetsParams& p) {
  const FluxionNetwork& n = p.network;
  bool fits = p.head_dim % 16 == 0 && p.kv_heads >= 1 && p.heads % p.kv_heads == 0 &&
              n.layers >= 1 && n.layers <= kFluxionMostLayers && n.widths[0] == kFluxionFeatures;
  for (int32_t layer = 0; fits && layer < n.layers; ++layer) {
    fits = n.widths[layer + 1] >= 1 && n.widths[layer + 1] <= kFluxionMostWidth;
  }
  const int32_t outputs = n.form == FluxionForm::kLine ? 3 : kFluxionLevels + 1;
  if (!fits || n.widths[n.layers] != outputs) {
    KernelCheckFailed("predict_budgets: head_dim a multiple of 16, and a network of the form");
  }
}

template <class S>
void PredictBudgets(const PredictBudgetsParams& p, Worker worker) {
  CheckBudgets(p);
  BudgetValues a = {}, b = {};
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t i = mine.begin; i < mine.end;) {
    const int64_t row = i / p.heads, end = Min(mine.end, (row + 1) * p.heads);
    if (p.slots[row] >= 0) {
      const float resident = LargestResident<S>(p, row);
      for (; i < end; i += kBudgetHeads) {
        PredictHeads<S>(p, i, Min(i + kBudgetHeads, end), resident, a, b);
      }
    }
    i = end;
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
