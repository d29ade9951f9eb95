// Code that the kernels of latent attention share: at the end of a list, a row's softmax becomes
// a result, merged with that of another list of the same row.
#pragma once

#include "kernels/cuda/attention/attention_plan.cuh"
#include "kernels/cuda/mla/mla_walk.cuh"
#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// out = own * o + other * other_o, with o the unscaled sum of the list.
struct MlaResult {
  float own;
  float other;  // if 0, other_o is not read
  float lse;
};

// Returns the factors of a merge with a result whose lse is `other`; -inf merges with none. An
// empty list has l = 0.
__device__ __forceinline__ MlaResult ResultOf(const Softmax& state, float other) {
  const bool empty = state.l == 0.0f;
  const float lse = empty ? NegativeInfinity() : NaturalLse(state);
  const float inverse = empty ? 0.0f : 1.0f / state.l;
  if (other == NegativeInfinity()) return {inverse, 0.0f, lse};
  const float largest = fmaxf(other, lse);
  const float first = expf(other - largest), second = empty ? 0.0f : expf(lse - largest);
  const float sum = first + second;
  return {second / sum * inverse, first / sum, largest + logf(sum)};
}

// As above for item row * heads + head of a call with one list.
__device__ __forceinline__ MlaResult ResultOf(const SparseMlaParams& p, int64_t item,
                                              const Softmax& state) {
  return ResultOf(state, p.other_o == nullptr ? NegativeInfinity() : p.other_lse[item]);
}

__device__ __forceinline__ float ElementOf(const MlaResult& result, float o, float other_o) {
  return result.other == 0.0f ? o * result.own : fmaf(o, result.own, other_o * result.other);
}

}  // namespace sluice::kernels::cuda
