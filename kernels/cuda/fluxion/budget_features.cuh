// The features of the predictor's heads: a warp takes a query head at a time, and its sums run over
// lanes in one order. A block finds the largest output of its row by itself, as it would otherwise
// have to wait for others: 32 heads of 128 are 32 KB, which lie in L2.
#pragma once

#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {

// Heads of one row whose networks a block runs side by side, and its threads.
inline constexpr int kBudgetHeads = 8;
inline constexpr int kBudgetThreads = 512;
inline constexpr int kBudgetWarps = kBudgetThreads / 32;

struct BudgetFeatures {
  float of[kBudgetHeads][kFluxionFeatures];
  float resident[kBudgetWarps];  // the largest length among the heads that a warp saw
};

__device__ __forceinline__ float BudgetSum(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, s);
  return x;
}

// Returns the larger length; NaN if either is not a number, so that all heads of the row lack the
// feature.
__device__ __forceinline__ float LargerLength(float a, float b) { return b > a || b != b ? b : a; }

// Lengths of the outputs of a head: over its sink, its local tokens, and both together.
struct OutputLengths {
  float sink, local, resident;
};

// Computes them for head i (row * heads + head), in all lanes of a warp.
__device__ __forceinline__ OutputLengths LengthsOf(const PredictBudgetsParams& p, int64_t i,
                                                   int lane) {
  const float sink = p.sink_lse[i], local = p.local_lse[i];
  const bool none = sink == -INFINITY && local == -INFINITY;
  const float largest = sink > local ? sink : local;
  const float of_sink = expf(sink - largest), of_local = expf(local - largest);
  const float sink_share = of_sink / (of_sink + of_local);
  const float local_share = of_local / (of_sink + of_local);
  float sink_squares = 0, local_squares = 0, squares = 0;
#pragma unroll 4
  for (int d = lane; d < p.head_dim; d += 32) {
    const float a = p.sink_o[i * p.head_dim + d], b = p.local_o[i * p.head_dim + d];
    const float o = fmaf(sink_share, a, local_share * b);
    sink_squares = fmaf(a, a, sink_squares);
    local_squares = fmaf(b, b, local_squares);
    squares = fmaf(o, o, squares);
  }
  return {sqrtf(BudgetSum(sink_squares)), sqrtf(BudgetSum(local_squares)),
          none ? 0 : sqrtf(BudgetSum(squares))};
}

// Returns which feature has this number of FluxionAnchors::heads.
__device__ __forceinline__ int FeatureOfAnchor(int number) {
  if (number < 4) return 17 + number;   // moments
  if (number < 7) return 20 + number;   // lse
  if (number < 10) return 22 + number;  // lengths
  return number == 10 ? 33 : 24 + number;
}

// Writes all features of a head but 27, 28 and 39.
__device__ __forceinline__ void HeadFeatures(const PredictBudgetsParams& p, int row, int head,
                                             int lane, float* f) {
  static_assert(kAnchorKvNumbers + kAnchorHeadNumbers <= 32, "a lane takes a number");
  const int dim = p.head_dim, slot = p.slots[row];
  const int64_t i = int64_t{row} * p.heads + head;
  const int kv_head = head / (p.heads / p.kv_heads);
  const float* const q = p.q + row * p.q_stride + int64_t{head} * dim;
  const float* const kv =
      p.anchors.kv + (int64_t{slot} * p.kv_heads + kv_head) * (kAnchorKvNumbers + dim);
  const float* const anchor =
      p.anchors.heads + (int64_t{slot} * p.heads + head) * (kAnchorHeadNumbers + dim);
  if (lane < kAnchorKvNumbers) {
    f[4 + lane] = kv[lane];
  } else if (lane < kAnchorKvNumbers + kAnchorHeadNumbers) {
    f[FeatureOfAnchor(lane - kAnchorKvNumbers)] = anchor[lane - kAnchorKvNumbers];
  }
  const float variance = anchor[1], anchor_length = anchor[10];
  float squares = 0, with_mean = 0, with_anchor = 0;
#pragma unroll 4
  for (int d = lane; d < dim; d += 32) {
    const float x = q[d];
    squares = fmaf(x, x, squares);
    with_mean = fmaf(x, kv[kAnchorKvNumbers + d], with_mean);
    with_anchor = fmaf(x, anchor[kAnchorHeadNumbers + d], with_anchor);
  }
  const float length = sqrtf(BudgetSum(squares));
  with_mean = BudgetSum(with_mean);
  with_anchor = BudgetSum(with_anchor);
  if (lane != 0) return;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const auto tokens = static_cast<float>(CpuTokens(segments));
  const float mean = with_mean / (length * sqrtf(static_cast<float>(dim)));
  f[0] = static_cast<float>(p.layer);
  f[1] = static_cast<float>(head);
  f[2] = tokens;
  f[3] = static_cast<float>(segments.end - CpuTokens(segments));
  f[16] = mean;
  f[21] = p.sink_lse[i];
  f[22] = logf(tokens) + length * mean + length * length * variance * 0.5f;
  f[23] = p.local_lse[i];
  f[32] = length;
  f[34] = with_anchor / (length * anchor_length);
  f[40] = p.anchors.resident[slot];
}

// Writes the features of `heads` heads of a row, the first of which is `first`. All threads of the
// block call it together, and may read what it wrote at once.
__device__ __forceinline__ void WriteFeatures(const PredictBudgetsParams& p, int row, int first,
                                              int heads, BudgetFeatures& features) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (warp < heads) HeadFeatures(p, row, first + warp, lane, features.of[warp]);
  float largest = 0;
  for (int head = warp; head < p.heads; head += kBudgetWarps) {
    const OutputLengths lengths = LengthsOf(p, int64_t{row} * p.heads + head, lane);
    largest = LargerLength(largest, lengths.resident);
    if (lane == 0 && head >= first && head < first + heads) {
      features.of[head - first][27] = lengths.sink;
      features.of[head - first][28] = lengths.local;
    }
  }
  if (lane == 0) features.resident[warp] = largest;
  __syncthreads();
  if (thread < heads) {
    largest = 0;
    for (const float of_warp : features.resident) largest = LargerLength(largest, of_warp);
    features.of[thread][39] = largest;
  }
  __syncthreads();
}

}  // namespace sluice::kernels::cuda
