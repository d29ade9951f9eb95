// Norms, rotary embedding, SwiGLU and merge for any path (`S`: see simd_math.h). Rows are split
// over workers. Reductions run in 16 lanes whatever the vector width, in one order.
#pragma once

#include "kernels/cpu/simd_math.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kMaxHeadDim = 256;

template <class S>
inline void StoreAs(void* out, DType type, int64_t index, typename S::F v) {
  if (type == DType::kFloat32) {
    S::Store(static_cast<float*>(out) + index, v);
  } else {
    S::StoreBf16(static_cast<uint16_t*>(out) + index, v);
  }
}

inline void PutAs(void* out, DType type, int64_t index, float v) {
  if (type == DType::kFloat32) {
    static_cast<float*>(out)[index] = v;
  } else {
    static_cast<uint16_t*>(out)[index] = FloatToBf16(v);
  }
}

// Returns 1 / sqrt(mean(x^2) + epsilon).
template <class S>
float InverseRms(const float* x, int64_t dim, float epsilon) {
  alignas(64) float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    for (int l = 0; l < 16; l += S::kWidth) {
      const typename S::F v = S::Load(x + i + l);
      S::Store(lanes + l, S::Fma(v, v, S::Load(lanes + l)));
    }
  }
  for (int l = 0; i < dim; ++i, ++l) lanes[l] += x[i] * x[i];
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + epsilon);
}

// Writes row `out` of the result, x * factor * weight; zeros if x is null.
template <class S>
void StoreNormed(const RmsNormParams& p, const float* x, float factor, const float* weight,
                 void* result, int64_t row) {
  const int64_t out = row * p.dim;
  int64_t i = 0;
  if (x == nullptr) {
    for (; i < p.dim; ++i) PutAs(result, p.out_type, out + i, 0);
    return;
  }
  for (; i + S::kWidth <= p.dim; i += S::kWidth) {
    const typename S::F v = S::Mul(S::Load(x + i), S::Set1(factor));
    StoreAs<S>(result, p.out_type, out + i, S::Mul(v, S::Load(weight + i)));
  }
  for (; i < p.dim; ++i) PutAs(result, p.out_type, out + i, x[i] * factor * weight[i]);
}

inline constexpr int64_t kMaxNormDim = 16384;

// Writes x + drift of a row of the look-ahead to `ahead`, and updates the drift of the layer
// before.
inline void AheadInput(const RmsNormParams& p, int64_t r, float* ahead) {
  const AheadNormParams& a = p.ahead;
  const float* const x = p.x + r * p.x_stride;
  const int64_t slot = a.slots == nullptr ? -1 : a.slots[r];
  const int64_t n = slot < 0 ? 0 : a.numbers[r];
  const bool known = slot >= 0 && n > 0 && a.drift != nullptr;
  const float* const drift = known ? a.drift + slot * a.slot_stride : nullptr;
  for (int64_t i = 0; i < p.dim; ++i) ahead[i] = known ? x[i] + drift[i] : x[i];
  if (a.before == nullptr) return;
  float* const before = a.before + r * p.dim;
  if (slot >= 0 && a.drift_before != nullptr) {
    float* const updated = a.drift_before + slot * a.slot_stride;
    const float mean = 1.0f / static_cast<float>(n + 1);
    const float weight = mean > kDriftWeight ? mean : kDriftWeight;
    for (int64_t i = 0; i < p.dim; ++i) {
      const float change = x[i] - before[i];
      updated[i] = n == 0 ? change : updated[i] + weight * (change - updated[i]);
    }
  }
  for (int64_t i = 0; i < p.dim; ++i) before[i] = x[i];
}

template <class S>
void RmsNorm(const RmsNormParams& p, Worker worker) {
  if (p.ahead.rows > 0 && p.dim > kMaxNormDim) {
    KernelCheckFailed("rms_norm: rows of the look-ahead have 16384 elements at most");
  }
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t source = p.row_index != nullptr ? p.row_index[r] : r;
    const float* const x = source < 0 ? nullptr : p.x + source * p.x_stride;
    const float factor = x == nullptr ? 0 : InverseRms<S>(x, p.dim, p.epsilon);
    StoreNormed<S>(p, x, factor, p.weight, p.out, r);
    if (r >= p.ahead.rows) continue;
    alignas(64) float ahead[kMaxNormDim];
    AheadInput(p, r, ahead);
    if (p.ahead.out == nullptr) continue;
    StoreNormed<S>(p, ahead, InverseRms<S>(ahead, p.dim, p.epsilon), p.ahead.weight, p.ahead.out,
                   r);
  }
}

template <class S>
inline typename S::F SiluMulVector(typename S::F gate, typename S::F up) {
  // exp(-gate) stays finite: beyond 88 the quotient is below the smallest float that matters.
  const typename S::F minus = S::Min(S::Set1(88.0f), S::Sub(S::Set1(0.0f), gate));
  return S::Mul(S::Div(gate, S::Add(S::Set1(1.0f), Exp<S>(minus))), up);
}

template <class S>
void SiluMul(const SiluMulParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const float* gate = p.gate_up + r * 2 * p.dim;
    const float* up = gate + p.dim;
    int64_t i = 0;
    for (; i + S::kWidth <= p.dim; i += S::kWidth) {
      StoreAs<S>(p.out, p.out_type, r * p.dim + i,
                 SiluMulVector<S>(S::Load(gate + i), S::Load(up + i)));
    }
    if (i == p.dim) continue;
    alignas(64) float tail[2][S::kWidth] = {};
    for (int64_t j = i; j < p.dim; ++j) {
      tail[0][j - i] = gate[j];
      tail[1][j - i] = up[j];
    }
    S::Store(tail[0], SiluMulVector<S>(S::Load(tail[0]), S::Load(tail[1])));
    for (int64_t j = i; j < p.dim; ++j) PutAs(p.out, p.out_type, r * p.dim + j, tail[0][j - i]);
  }
}

// Applies the norm (if `weight` is given) and the rotation to one head, from `x` to `out`. cosines,
// sines: [dim / 2].
template <class S>
void NormAndRotate(const float* x, const float* weight, float epsilon, const float* cosines,
                   const float* sines, int64_t dim, float* out) {
  alignas(64) float normed[kMaxHeadDim];
  if (weight != nullptr) {
    const float factor = InverseRms<S>(x, dim, epsilon);
    for (int64_t i = 0; i < dim; ++i) normed[i] = x[i] * factor * weight[i];
    x = normed;
  }
  const int64_t half = dim / 2;
  alignas(64) float turned[kMaxHeadDim];
  for (int64_t i = 0; i < half; ++i) {
    turned[i] = x[i] * cosines[i] - x[i + half] * sines[i];
    turned[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
  }
  for (int64_t i = 0; i < dim; ++i) out[i] = turned[i];
}

// Writes [dim] floats at element `index` of an array of `type`.
inline void WriteRounded(void* array, DType type, int64_t index, const float* x, int64_t dim) {
  if (type == DType::kFloat32) {
    float* out = static_cast<float*>(array) + index;
    for (int64_t i = 0; i < dim; ++i) out[i] = x[i];
  } else {
    uint16_t* out = static_cast<uint16_t*>(array) + index;
    for (int64_t i = 0; i < dim; ++i) out[i] = FloatToBf16(x[i]);
  }
}

template <class S>
void RopeAppend(const RopeAppendParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim;
  if (dim > kMaxHeadDim || dim % 2 != 0) KernelCheckFailed("rope_append: head_dim even, <= 256");
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    alignas(64) float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2], key[kMaxHeadDim];
    for (int64_t i = 0; i < dim / 2; ++i) {
      cosines[i] = p.cos_sin[r * dim + 2 * i];
      sines[i] = p.cos_sin[r * dim + 2 * i + 1];
    }
    float* q = p.qkv + r * (p.heads + 2 * c.kv_heads) * dim;
    const float* k = q + p.heads * dim;
    const float* v = k + c.kv_heads * dim;
    for (int64_t h = 0; h < p.heads; ++h) {
      NormAndRotate<S>(q + h * dim, p.q_norm, p.epsilon, cosines, sines, dim, q + h * dim);
    }
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      NormAndRotate<S>(k + h * dim, p.k_norm, p.epsilon, cosines, sines, dim, key);
      const int64_t at = KeyIndex(c, p.slots[r], p.positions[r], h);
      WriteRounded(c.base, c.type, at, key, dim);
      WriteRounded(c.base, c.type, at + int64_t{c.block_tokens} * dim, v + h * dim, dim);
      if (p.written == nullptr) continue;
      const int64_t copy = (r * c.kv_heads + h) * 2 * dim;
      WriteRounded(p.written, c.type, copy, key, dim);
      WriteRounded(p.written, c.type, copy + dim, v + h * dim, dim);
    }
  }
}

// A running merge of partial results of one head: o [dim] is not yet divided by `sum`.
struct MergeState {
  float largest = kNegativeInfinity;
  float sum = 0;
};

// Merges one part in. The first part is taken as it is, so that one part alone comes out unchanged.
template <class S>
inline void MergePart(MergeState& state, float* o, const float* part_o, float part_lse,
                      int64_t dim) {
  if (part_lse == kNegativeInfinity) return;
  if (state.sum == 0) {
    for (int64_t i = 0; i < dim; ++i) o[i] = part_o[i];
    state.largest = part_lse;
    state.sum = 1;
    return;
  }
  const float largest = part_lse > state.largest ? part_lse : state.largest;
  const float old_weight = __builtin_expf(state.largest - largest);
  const float new_weight = __builtin_expf(part_lse - largest);
  for (int64_t i = 0; i < dim; ++i) o[i] = o[i] * old_weight + part_o[i] * new_weight;
  state.sum = state.sum * old_weight + new_weight;
  state.largest = largest;
}

// Writes the merged result; an empty state gives zeros and -inf.
template <class S>
inline void FinishMerge(const MergeState& state, const float* o, int64_t dim, void* out,
                        DType out_type, int64_t out_index, float* lse) {
  const bool empty = state.sum == 0;
  int64_t i = 0;
  if (!empty) {
    const typename S::F sum = S::Set1(state.sum);
    for (; i + S::kWidth <= dim; i += S::kWidth) {
      StoreAs<S>(out, out_type, out_index + i, S::Div(S::Load(o + i), sum));
    }
  }
  for (; i < dim; ++i) PutAs(out, out_type, out_index + i, empty ? 0.0f : o[i] / state.sum);
  if (lse != nullptr) *lse = empty ? kNegativeInfinity : state.largest + __builtin_logf(state.sum);
}

template <class S>
void Merge(const MergeParams& p, Worker worker) {
  if (p.head_dim > kMaxHeadDim) KernelCheckFailed("merge: head_dim <= 256");
  const int64_t all = int64_t{p.rows} * p.heads;
  const Range mine = Share(all, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    alignas(64) float o[kMaxHeadDim];
    MergeState state;
    for (int64_t part = 0; part < p.parts; ++part) {
      const int64_t at = part * all + item;
      MergePart<S>(state, o, p.o + at * p.head_dim, p.lse[at], p.head_dim);
    }
    FinishMerge<S>(state, o, p.head_dim, p.out, p.out_type, item * p.head_dim,
                   p.out_lse != nullptr ? p.out_lse + item : nullptr);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
