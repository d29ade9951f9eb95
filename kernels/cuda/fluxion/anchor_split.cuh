// The pass over keys and values of AnchorStatistics: each block takes a split of the tokens of one
// KV head. The cache may lie across the link, so every key and value is read once, and a warp
// starts all loads of a unit before it needs the first.
#pragma once

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/fluxion/anchor_reduce.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kSplitWarps = 8;
inline constexpr int kSplitThreads = 32 * kSplitWarps;
inline constexpr int kAnchorMaxGroup = 8;
inline constexpr int kAnchorMaxDim = 256;
// A warp takes a unit in pieces of so many elements of its tokens. In shared memory a token's
// piece has two more, so that 16 tokens' elements 2 i and 2 i + 1 lie in different banks.
inline constexpr int kPieceDims = 128;
inline constexpr int kPieceStride = kPieceDims + 2;
inline constexpr int kPieces = kAnchorMaxDim / kPieceDims;

// The shared memory of a block, in floats.
struct SplitShared {
  float* pieces;   // [warps][16][kPieceStride]
  float* weights;  // [warps][kAnchorMaxGroup][16]
  float* lengths;  // [2][kAnchorSplitTokens] of K, V
  float* q;        // [group][head_dim]
  float* dots;     // [group][kAnchorSplitTokens]
};
inline constexpr int kPieceFloats = kAnchorUnitTokens * kPieceStride;
inline constexpr int kWeightFloats = kAnchorMaxGroup * kAnchorUnitTokens;
static_assert(kPieceFloats >= 2 * kAnchorMaxDim);

inline size_t SplitSharedBytes(int group, int head_dim) {
  return sizeof(float) * (kSplitWarps * (kPieceFloats + kWeightFloats) + 2 * kAnchorSplitTokens +
                          group * (head_dim + kAnchorSplitTokens));
}
__device__ __forceinline__ SplitShared SplitSharedOf(float* memory, int group, int head_dim) {
  SplitShared s{};
  s.pieces = memory;
  s.weights = s.pieces + kSplitWarps * kPieceFloats;
  s.lengths = s.weights + kSplitWarps * kWeightFloats;
  s.q = s.lengths + 2 * kAnchorSplitTokens;
  s.dots = s.q + group * head_dim;
  return s;
}

__device__ __forceinline__ float4 FloatsOf(float4 raw) { return raw; }
__device__ __forceinline__ float4 FloatsOf(uint2 raw) {
  return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
          __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u)};
}
template <typename T>
struct RawOf;
template <>
struct RawOf<float> {
  using Four = float4;
};
template <>
struct RawOf<__nv_bfloat16> {
  using Four = uint2;
};

// Copies elements [begin, begin + width) of each of a unit's tokens to the warp's piece. Tokens
// from `count` on are zeros: what lies there may be anything.
template <typename T>
__device__ __forceinline__ void LoadPiece(const T* unit, int count, int dim, int begin, int width,
                                          float* piece) {
  using Four = typename RawOf<T>::Four;
  constexpr int kLoads = kAnchorUnitTokens * kPieceDims / 4 / 32;
  const int lane = threadIdx.x % 32, across = width / 4;
  Four raw[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int token = (lane + 32 * i) / across, column = (lane + 32 * i) % across;
    raw[i] = Four{};
    if (token < count) {
      raw[i] = *reinterpret_cast<const Four*>(unit + token * dim + begin + 4 * column);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int token = (lane + 32 * i) / across, column = (lane + 32 * i) % across;
    if (token >= kAnchorUnitTokens) continue;
    const float4 v = FloatsOf(raw[i]);
    float2* const to = reinterpret_cast<float2*>(piece + token * kPieceStride + 4 * column);
    to[0] = {v.x, v.y};
    to[1] = {v.z, v.w};
  }
  __syncwarp();
}

// Adds a piece's columns to the lane's sums: column lane + 32 j to sums[j].
__device__ __forceinline__ void AddColumns(const float* piece, int width, float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (lane + 32 * j >= width) continue;
    for (int t = 0; t < kAnchorUnitTokens; ++t) sums[j] += piece[t * kPieceStride + lane + 32 * j];
  }
}

// A warp's unit, and where its results go.
struct SplitUnit {
  int unit, count;  // tokens
  int in_split;     // its first token, counted from the split's
  int first_head, group, dim;
  bool is_cpu;
};

// Takes a unit's keys: products and lengths to shared memory, peaks and weights to the scratch.
template <typename T>
__device__ __forceinline__ void TakeKeys(const AnchorStatisticsParams& p,
                                         const AnchorLayout& layout, const SplitUnit& u,
                                         const SplitShared& s, const T* keys, float* piece,
                                         float* weights, float (&sums)[kPieces][4]) {
  const int lane = threadIdx.x % 32, token = lane % kAnchorUnitTokens, half = lane / 16;
  float dots[kAnchorMaxGroup] = {}, square = 0;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int begin = c * kPieceDims, width = min(kPieceDims, u.dim - begin);
    if (width <= 0) continue;
    LoadPiece(keys, u.count, u.dim, begin, width, piece);
    for (int i = half; i < width; i += 2) {
      const float k = piece[token * kPieceStride + i];
      square = fmaf(k, k, square);
#pragma unroll
      for (int h = 0; h < kAnchorMaxGroup; ++h) {
        if (h < u.group) dots[h] = fmaf(s.q[h * u.dim + begin + i], k, dots[h]);
      }
    }
    if (u.is_cpu) AddColumns(piece, width, sums[c]);
    __syncwarp();
  }
  square += __shfl_xor_sync(0xFFFFFFFFu, square, 16);
  if (half == 0) s.lengths[u.in_split + token] = sqrtf(square);
#pragma unroll
  for (int h = 0; h < kAnchorMaxGroup; ++h) {
    if (h >= u.group) continue;
    const float dot = dots[h] + __shfl_xor_sync(0xFFFFFFFFu, dots[h], 16);
    const float score = token < u.count ? p.scale * dot : -INFINITY;
    float peak = score;
    for (int step = 8; step > 0; step /= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, step));
    }
    const float weight = expf(score - peak);
    float sum = weight;
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (half == 0) {
      s.dots[h * kAnchorSplitTokens + u.in_split + token] = dot;
      weights[h * kAnchorUnitTokens + token] = weight;
    }
    if (lane == 0) {
      const int64_t at = int64_t{u.first_head + h} * layout.units + u.unit;
      AnchorArray<float>(p, layout.peaks)[at] = peak;
      AnchorArray<float>(p, layout.weights)[at] = sum;
    }
  }
  __syncwarp();
}

// Takes a unit's values: lengths to shared memory, weighted sums to the scratch.
template <typename T>
__device__ __forceinline__ void TakeValues(const AnchorStatisticsParams& p,
                                           const AnchorLayout& layout, const SplitUnit& u,
                                           const SplitShared& s, const T* values, float* piece,
                                           const float* weights, float (&sums)[kPieces][4]) {
  const int lane = threadIdx.x % 32, token = lane % kAnchorUnitTokens, half = lane / 16;
  float square = 0;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int begin = c * kPieceDims, width = min(kPieceDims, u.dim - begin);
    if (width <= 0) continue;
    LoadPiece(values, u.count, u.dim, begin, width, piece);
    for (int i = half; i < width; i += 2) {
      const float v = piece[token * kPieceStride + i];
      square = fmaf(v, v, square);
    }
    for (int d = lane; d < width; d += 32) {
      float v[kAnchorUnitTokens];
#pragma unroll
      for (int t = 0; t < kAnchorUnitTokens; ++t) v[t] = piece[t * kPieceStride + d];
      for (int h = 0; h < u.group; ++h) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < kAnchorUnitTokens; ++t) {
          sum = fmaf(weights[h * kAnchorUnitTokens + t], v[t], sum);
        }
        const int64_t at = int64_t{u.first_head + h} * layout.units + u.unit;
        AnchorArray<float>(p, layout.values)[at * u.dim + begin + d] = sum;
      }
    }
    if (u.is_cpu) AddColumns(piece, width, sums[c]);
    __syncwarp();
  }
  square += __shfl_xor_sync(0xFFFFFFFFu, square, 16);
  if (half == 0) s.lengths[kAnchorSplitTokens + u.in_split + token] = sqrtf(square);
}

// Computes the moments of x[0, count) in a warp.
__device__ __forceinline__ AnchorMoments WarpMoments(const float* x, int count) {
  const int lane = threadIdx.x % 32;
  double sum = 0;
  for (int i = lane; i < count; i += 32) sum += double{x[i]};
  AnchorMoments m;
  m.mean = AnchorWarpSum(sum) / count;
  for (int i = lane; i < count; i += 32) {
    const double off = double{x[i]} - m.mean, square = off * off;
    m.second += square;
    m.third += square * off;
    m.fourth += square * square;
  }
  m.second = AnchorWarpSum(m.second);
  m.third = AnchorWarpSum(m.third);
  m.fourth = AnchorWarpSum(m.fourth);
  return m;
}

// Writes what the split adds to the moments: of lengths, and of the products of each head.
__device__ __forceinline__ void PutSplitMoments(const AnchorStatisticsParams& p,
                                                const AnchorLayout& layout,
                                                const FluxionSegments& segments, int split,
                                                int kv_head, int group, const SplitShared& s) {
  const int begin = split * kAnchorSplitTokens;
  const int from = max(segments.sink - begin, 0);
  const int to = min(segments.local - begin, kAnchorSplitTokens);
  for (int i = threadIdx.x / 32; i < group + 2; i += kSplitWarps) {
    if (from >= to) continue;
    const bool of_head = i < group;
    const float* const x =
        of_head ? s.dots + i * kAnchorSplitTokens : s.lengths + (i - group) * kAnchorSplitTokens;
    const AnchorMoments m = WarpMoments(x + from, to - from);
    if (threadIdx.x % 32 != 0) continue;
    if (of_head) {
      AnchorArray<AnchorMoments>(
          p, layout.z_moments)[int64_t{kv_head * group + i} * layout.splits + split] = m;
    } else {
      AnchorArray<AnchorMoments>(
          p, layout.kv_moments)[(int64_t{kv_head} * layout.splits + split) * 2 + i - group] = m;
    }
  }
}

// Blocks are (split, KV head), as many splits as a sequence may have.
template <typename T>
__global__ void __launch_bounds__(kSplitThreads, 1)
    AnchorSplitKernel(const AnchorStatisticsParams p, int row) {
  extern __shared__ __align__(16) float split_memory[];
  WaitForPriorKernels();
  const int slot = p.slots[row];
  if (slot < 0) return;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const int split = blockIdx.x, kv_head = blockIdx.y, begin = split * kAnchorSplitTokens;
  if (begin >= segments.end) return;
  const int dim = p.cache.head_dim, group = p.heads / p.cache.kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const AnchorLayout layout = RowLayout(p, row);
  const SplitShared s = SplitSharedOf(split_memory, group, dim);
  const float* const q = p.q + row * p.q_stride + int64_t{kv_head} * group * dim;
  for (int i = threadIdx.x; i < group * dim; i += kSplitThreads) s.q[i] = q[i];
  __syncthreads();

  float* const piece = s.pieces + warp * kPieceFloats;
  float* const weights = s.weights + warp * kWeightFloats;
  float key_sums[kPieces][4] = {}, value_sums[kPieces][4] = {};
  const int units = (min(kAnchorSplitTokens, segments.end - begin) - 1) / kAnchorUnitTokens + 1;
  for (int i = warp; i < units; i += kSplitWarps) {
    const int token = begin + i * kAnchorUnitTokens;
    const SplitUnit u = {token / kAnchorUnitTokens,
                         min(kAnchorUnitTokens, segments.end - token),
                         i * kAnchorUnitTokens,
                         kv_head * group,
                         group,
                         dim,
                         token >= segments.sink && token < segments.local};
    const int block = token / p.cache.block_tokens;
    const T* const keys = BlockKeys<T>(p.cache, slot, block, kv_head) +
                          int64_t{token - block * p.cache.block_tokens} * dim;
    TakeKeys(p, layout, u, s, keys, piece, weights, key_sums);
    TakeValues(p, layout, u, s, keys + int64_t{p.cache.block_tokens} * dim, piece, weights,
               value_sums);
  }
  // The warps' sums of columns lie in their pieces, [2][head_dim], until they are added.
#pragma unroll
  for (int j = 0; j < kPieces * 4; ++j) {
    const int d = lane + 32 * j;
    if (d >= dim) continue;
    piece[d] = key_sums[j / 4][j % 4];
    piece[dim + d] = value_sums[j / 4][j % 4];
  }
  __syncthreads();
  float* const sums =
      AnchorArray<float>(p, layout.kv_sums) + (int64_t{kv_head} * layout.splits + split) * 2 * dim;
  for (int i = threadIdx.x; i < 2 * dim; i += kSplitThreads) {
    float sum = 0;
    for (int w = 0; w < kSplitWarps; ++w) sum += s.pieces[w * kPieceFloats + i];
    sums[i] = sum;
  }
  PutSplitMoments(p, layout, segments, split, kv_head, group, s);
  if (split == 0 && warp < 2) {
    double sum = 0;
    for (int t = lane; t < segments.sink; t += 32) {
      sum += double{s.lengths[warp * kAnchorSplitTokens + t]};
    }
    sum = AnchorWarpSum(sum);
    if (lane == 0) KvNumbers(p, slot, kv_head)[warp] = static_cast<float>(sum / segments.sink);
  }
}

}  // namespace sluice::kernels::cuda
