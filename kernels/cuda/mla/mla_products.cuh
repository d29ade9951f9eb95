// The products of latent attention over lists (sparse_mla_packed.cu), and the softmax between
// them.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/mla/mla_entries.cuh"

namespace sluice::kernels::cuda {

// Puts a descriptor, which is the same in all of a warp, into a uniform register, so that a step
// from it is one instruction. The compiler does not see that a warp's threads branch alike and
// would move four registers a step.
__device__ __forceinline__ uint64_t Uniform(uint64_t tile) {
  return (tile & 0xffffffff00000000) | __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(tile));
}

// Returns a tile's descriptor `bytes` further on. Only its first half changes.
__device__ __forceinline__ uint64_t TileFrom(uint64_t tile, int bytes) {
  return (tile & 0xffffffff00000000) |
         (static_cast<uint32_t>(tile) + static_cast<uint32_t>(bytes) / 16);
}

// Adds the weighted values of a tile to a warpgroup's 256 columns.
__device__ __forceinline__ void AddValues(float (&o)[128], const uint4 (&weights)[4],
                                          uint64_t tile) {
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaTileEntries / 16; ++step) {
    const uint32_t a[4] = {weights[step].x, weights[step].y, weights[step].z, weights[step].w};
    MultiplyRowsFp16<0>(o, a, TileFrom(tile, step * 16 * 128));
    MultiplyRowsFp16<64>(o, a, TileFrom(tile, step * 16 * 128 + 2 * kMlaColumnBlockBytes));
  }
  CommitProducts();
}

__device__ __forceinline__ void Keep(float (&o)[128], float2 keep) {
  if (!__any_sync(0xffffffffu, keep.x != 1.0f || keep.y != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 == 0 ? keep.x : keep.y;
}

// Reduces by `op` the 16 scores that a thread has of each of its two rows.
template <typename Op>
__device__ __forceinline__ float2 ReduceScores(const float (&score)[32], Op op) {
  float of[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) of[i / 2 % 2][i / 4 * 2 + i % 2] = score[i];
#pragma unroll
  for (int i = 8; i < 32; ++i) {
    float& to = of[i / 2 % 2][i / 4 % 2 * 2 + i % 2];
    to = op(to, score[i]);
  }
  return {op(op(of[0][0], of[0][1]), op(of[0][2], of[0][3])),
          op(op(of[1][0], of[1][1]), op(of[1][2], of[1][3]))};
}

// A row's reference score, to which all are relative, follows a new largest score only if that is
// larger by more than this power of two. So the sums are hardly ever rescaled after a piece's
// first tile. Weights are at most 2^kMlaSlack, within fp16, and values that fp16 cannot hold only
// become smaller.
inline constexpr float kMlaSlack = 8.0f;

// Turns the scores of a tile into weights, in place, and adds them to the softmax. Returns the
// factors by which earlier sums are kept. `valid` is the number of entries that count.
__device__ __forceinline__ float2 Weigh(float (&score)[32], Softmax (&state)[2], float scale,
                                        int valid) {
  if (valid < kMlaTileEntries) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (column + i / 4 * 8 + i % 2 >= valid) score[i] = NegativeInfinity();
    }
  }
  float2 m = ReduceScores(score, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float2 other = {__shfl_xor_sync(0xffffffffu, m.x, step),
                          __shfl_xor_sync(0xffffffffu, m.y, step)};
    m = {fmaxf(m.x, other.x), fmaxf(m.y, other.y)};
  }
  const float largest[2] = {m.x * scale, m.y * scale};
  float keep[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool follows = largest[h] > state[h].m + kMlaSlack;
    const float before = state[h].m, now = follows ? largest[h] : before;
    // The factor is 1 where there are no earlier sums.
    keep[h] = follows && before != NegativeInfinity() ? Exp2(before - now) : 1.0f;
    state[h].m = now;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) score[i] = Exp2(fmaf(score[i], scale, -state[i / 2 % 2].m));
  const float2 sum = ReduceScores(score, [](float x, float y) { return x + y; });
  state[0].l = fmaf(state[0].l, keep[0], sum.x);
  state[1].l = fmaf(state[1].l, keep[1], sum.y);
  return {keep[0], keep[1]};
}

}  // namespace sluice::kernels::cuda
