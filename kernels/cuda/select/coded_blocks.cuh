// Shortlists of blocks with key codes, and their scores in plain float32, in any shape.
#pragma once

#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {

__device__ __forceinline__ const uint32_t* CodesAt(const PagedRows& codes, int slot, int token,
                                                   int head) {
  return RowAt<uint32_t>(codes, slot, token, head);
}

// KeyCodeLevel as a distance from the middle.
inline constexpr auto kInnerLevel = static_cast<float>(KeyCodeLevel(true, false) - 0.5);
inline constexpr auto kOuterLevel = static_cast<float>(KeyCodeLevel(true, true) - 0.5);

// A list of the shortlist: the blocks before the newest.
struct Shortlist {
  const int32_t* blocks;
  int count, newest;

  __device__ Shortlist(const RefineScoresParams& p, int row, int kv_head)
      : newest(p.positions[row] / p.block_tokens) {
    const int64_t list = int64_t{row} * p.digests.kv_heads + kv_head;
    blocks = p.units.units + list * p.units.capacity;
    count = p.units.counts[list];
    if (count > 0 && blocks[count - 1] >= newest) --count;  // a list is ascending
  }
  // Writes -inf to the blocks between entry i - 1 and entry i, and behind the last if i is `count`;
  // `threads` threads share the work.
  __device__ void FillBefore(int i, float* scores, int thread, int threads) const {
    const int end = i < count ? blocks[i] : newest + 1;
    for (int block = (i == 0 ? 0 : blocks[i - 1] + 1) + thread; block < end; block += threads) {
      scores[block] = -INFINITY;
    }
  }
};

// The shortlist of one row and KV head in plain float32, in any shape (group_scores.cuh).
template <typename T>
struct CodedBlocks {
  using Params = RefineScoresParams;
  const Params& p;
  int row, kv_head, slot;
  Shortlist list;

  static __host__ __device__ int RowDim(const Params& p) { return p.digests.dim / 2; }
  static __host__ __device__ int KvHeads(const Params& p) { return p.digests.kv_heads; }
  __device__ CodedBlocks(const Params& params, int of_row, int head)
      : p(params), row(of_row), kv_head(head), slot(p.slots[row]), list(p, row, head) {}

  __device__ int Units() const { return slot < 0 ? -1 : list.count; }
  __device__ int UnitAt(int i) const { return list.blocks[i]; }
  __device__ void PutQuery(int head, float* to) const {
    const int dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
    const float* q = p.q + row * p.q_stride + (kv_head * group + head) * dim;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32 * kScoreWarps) {
      to[d] = q[d] * p.scale;
    }
  }
  // A lane makes the keys of every 32nd token.
  __device__ float Score(const float* queries, int count, int i) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int dim = p.digests.dim / 2, words = p.codes.dim / 2;
    const T* digest = RowAt<T>(p.digests, slot, list.blocks[i], kv_head);
    float mine = -INFINITY;
    for (int h = 0; h < count; ++h) {
      RunningSum sum = RunningSum::Empty();
      for (int t = lane; t < p.block_tokens; t += 32) {
        const uint32_t* codes =
            CodesAt(p.codes, slot, list.blocks[i] * p.block_tokens + t, kv_head);
        float dot = 0;
        for (int d = 0; d < dim; ++d) {
          const bool upper = (codes[d / 32] >> (d % 32) & 1) != 0;
          const bool outer = (codes[words + d / 32] >> (d % 32) & 1) != 0;
          const auto least = static_cast<float>(digest[d]);
          const float range = static_cast<float>(digest[dim + d]) - least;
          const float level = outer ? kOuterLevel : kInnerLevel;
          const float key = fmaf(range, upper ? 0.5f + level : 0.5f - level, least);
          dot = fmaf(queries[h * dim + d], key, dot);
        }
        sum.Add(dot);
      }
      for (int other = 16; other > 0; other /= 2) {
        sum.Add({__shfl_xor_sync(0xffffffffu, sum.largest, other),
                 __shfl_xor_sync(0xffffffffu, sum.sum, other)});
      }
      if (lane == h) mine = sum.LogSumExp();
    }
    return mine;
  }
  __device__ void Finish(float* scores) const {
    const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    for (int i = 0; i <= list.count; ++i) list.FillBefore(i, scores, thread, threads);
  }
};

}  // namespace sluice::kernels::cuda
