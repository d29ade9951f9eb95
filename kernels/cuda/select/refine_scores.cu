// Scores of shortlisted blocks from their key codes.
//
// The kernel moves, for each block of the shortlist, its digest, 4 * head_dim bytes, and the codes
// of its tokens, head_dim / 4 bytes each: 1.5 KB for blocks of 32 and a head_dim of 128, 31 MB for
// 10 rows of Qwen3-14B (80 lists of 256 blocks), 7 us at 4.1 TB/s. The work is to make keys of
// codes: some 600 instructions a warp and block, 12 M for those lists, 13 us if every scheduler of
// an H200 issued one in every cycle. It runs beside products, which leave the schedulers idle.
//
// A warp takes a block at a time. The A operand of a tensor-core tile is 16 of its keys, made in
// registers from the digest and the codes, as bf16; the B operand is the queries of up to 8 heads,
// as bf16. A lane has 8 neighbouring elements in every 32 of a key, which are 2 of its elements in
// each of 4 positions of k, as in digest_scores.cu. Their code is a byte of each of two words.
//
// The thread blocks of a list take equal runs of its shortlist, and keep the scores of each head
// in shared memory. For sums of softmax they are a cluster, and exchange their sums in between. A
// score is a chain of its own, whichever block computes it, and sums are added in order.
#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {
namespace {

__device__ __forceinline__ const uint32_t* CodesAt(const PagedRows& codes, int slot, int token,
                                                   int head) {
  return RowAt<uint32_t>(codes, slot, token, head);
}

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
          const uint32_t higher = codes[d / 32] >> (d % 32) & 1;
          const uint32_t lower = codes[words + d / 32] >> (d % 32) & 1;
          const auto least = static_cast<float>(digest[d]);
          const float eighth = (static_cast<float>(digest[dim + d]) - least) * 0.125f;
          dot = fmaf(queries[h * dim + d],
                     fmaf(eighth, static_cast<float>(4 * higher + 2 * lower + 1), least), dot);
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

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 16;
constexpr int kTileHeads = 8;
constexpr int kSegment = 32;  // elements of a key that four lanes make at a time
constexpr int kMaxKept = 48 << 10;

// Two bf16 of a register: a where `mask` is 0, b where it is 1.
__device__ __forceinline__ uint32_t Choose(uint32_t mask, uint32_t a, uint32_t b) {
  return (mask & b) | (~mask & a);
}
__device__ __forceinline__ uint32_t AddPairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// What a lane's 8 elements of a segment can be in the keys of a block: the middle of the lower and
// of the upper half of the block's range, and an eighth of the range, in pairs of bf16.
struct Levels {
  uint32_t lower[4], upper[4], eighth[4];

  __device__ __forceinline__ Levels(const uint4& least, const uint4& largest) {
    const uint32_t a[4] = {least.x, least.y, least.z, least.w};
    const uint32_t b[4] = {largest.x, largest.y, largest.z, largest.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a0 = __uint_as_float(a[i] << 16), a1 = __uint_as_float(a[i] & 0xffff0000u);
      const float w0 = __uint_as_float(b[i] << 16) - a0;
      const float w1 = __uint_as_float(b[i] & 0xffff0000u) - a1;
      lower[i] = PackBf16(fmaf(w0, 0.25f, a0), fmaf(w1, 0.25f, a1));
      upper[i] = PackBf16(fmaf(w0, 0.75f, a0), fmaf(w1, 0.75f, a1));
      eighth[i] = PackBf16(w0 * 0.125f, w1 * 0.125f);
    }
  }

  // Makes the lane's 8 elements of a key from byte lane % 4 of each word.
  __device__ __forceinline__ void Make(uint32_t higher, uint32_t lower_bits,
                                       uint32_t (&key)[4]) const {
    const uint32_t at = threadIdx.x % 4;
    // Byte 0 of `signs`: the code's byte, byte 1: the same from bit 1 on. Shifted to the left by 7
    // - 2 i, the signs of these bytes are bits 2 i and 2 i + 1 of the code. Bytes 1 and 3 of `ups`
    // are the same of the lower bits: there they are the signs of a pair of bf16.
    const uint32_t signs = __byte_perm(higher, higher >> 1, at | (4 + at) << 4);
    const uint32_t ups = __byte_perm(lower_bits, lower_bits >> 1, at << 4 | (4 + at) << 12);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A selector with its bit 3 set fills a byte with the sign of the selected one.
      const uint32_t half = SignsOfBytes(signs << (7 - 2 * i));
      const uint32_t step = eighth[i] ^ (~(ups << (7 - 2 * i)) & 0x80008000u);
      key[i] = AddPairs(Choose(half, lower[i], upper[i]), step);
    }
  }

 private:
  // Returns a mask of 16 bits for the sign of byte 0, and above it one for the sign of byte 1.
  __device__ __forceinline__ static uint32_t SignsOfBytes(uint32_t x) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(mask) : "r"(x));
    return mask;
  }
};

// The queries of up to 8 heads as B operands, in registers: bf16, scaled.
template <int segments>
struct QueryOperands {
  uint32_t pairs[segments][4];

  __device__ void Load(const float* q, int heads, int dim, float scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int s = 0; s < segments; ++s) {
      const float* from = q + min(lane / 4, heads - 1) * dim + s * kSegment + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = lane / 4 < heads ? from[2 * i] * scale : 0.0f;
        const float b = lane / 4 < heads ? from[2 * i + 1] * scale : 0.0f;
        pairs[s][i] = PackBf16(a, b);
      }
    }
  }
};

__device__ __forceinline__ void LoadWords(const uint32_t* from, uint32_t* to) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Computes the log-sum-exps of a block's scores for heads lane % 4 * 2 and the next, which all
// lanes with the same lane % 4 get. Called by a warp.
template <int segments>
__device__ float2 ScoreBlock(const RefineScoresParams& p, const QueryOperands<segments>& queries,
                             int slot, int kv_head, int block) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = p.digests.dim / 2;
  const auto* digest =
      reinterpret_cast<const unsigned char*>(RowAt<__nv_bfloat16>(p.digests, slot, block, kv_head));
  RunningSum a = RunningSum::Empty(), b = RunningSum::Empty();
  for (int first = 0; first < p.block_tokens; first += kTileRows) {
    const int token = block * p.block_tokens + first + lane / 4;
    const uint32_t* upper_row = CodesAt(p.codes, slot, token, kv_head);
    const uint32_t* lower_row = CodesAt(p.codes, slot, token + 8, kv_head);
    // The tile's upper and lower row: higher bits, then lower bits.
    uint32_t codes[2][2 * segments];
#pragma unroll
    for (int i = 0; i < segments / 2; ++i) {
      LoadWords(upper_row + 4 * i, codes[0] + 4 * i);
      LoadWords(lower_row + 4 * i, codes[1] + 4 * i);
    }
    float sums[4] = {}, odd[4] = {};
#pragma unroll
    for (int s = 0; s < segments; ++s) {
      const int at = s * 64 + lane % 4 * 16;
      const Levels levels(*reinterpret_cast<const uint4*>(digest + at),
                          *reinterpret_cast<const uint4*>(digest + 2 * dim + at));
      uint32_t upper[4], lower[4];
      levels.Make(codes[0][s], codes[0][segments + s], upper);
      levels.Make(codes[1][s], codes[1][segments + s], lower);
      const uint32_t a0[4] = {upper[0], lower[0], upper[1], lower[1]};
      const uint32_t a1[4] = {upper[2], lower[2], upper[3], lower[3]};
      MultiplyAdd(sums, a0, queries.pairs[s][0], queries.pairs[s][1]);
      MultiplyAdd(odd, a1, queries.pairs[s][2], queries.pairs[s][3]);
    }
    a.Add(sums[0] + odd[0]);
    b.Add(sums[1] + odd[1]);
    a.Add(sums[2] + odd[2]);
    b.Add(sums[3] + odd[3]);
  }
#pragma unroll
  for (int other = 4; other < 32; other *= 2) {
    a.Add({__shfl_xor_sync(0xffffffffu, a.largest, other),
           __shfl_xor_sync(0xffffffffu, a.sum, other)});
    b.Add({__shfl_xor_sync(0xffffffffu, b.largest, other),
           __shfl_xor_sync(0xffffffffu, b.sum, other)});
  }
  return {a.LogSumExp(), b.LogSumExp()};
}

// Grid: (kScoreParts, KV heads, rows); for sums of softmax in clusters of kScoreParts. Shared
// memory: scores of this block's entries, [capacity / kScoreParts + 1][kTileHeads].
template <int segments>
__global__ void __launch_bounds__(kThreads)
    RefineScoresKernel(const __grid_constant__ RefineScoresParams p) {
  extern __shared__ float kept[];
  __shared__ RunningSum sums[kTileHeads];
  __shared__ float lse[kTileHeads];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y);
  const int slot = p.slots[row];
  if (slot < 0) return;  // as all blocks of the list do
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int kv_heads = p.digests.kv_heads, group = p.heads / kv_heads, dim = p.digests.dim / 2;
  const Shortlist list(p, row, kv_head);
  float* const scores = p.scores + (int64_t{row} * kv_heads + kv_head) * p.score_stride;
  const int part = static_cast<int>(blockIdx.x);
  const int begin = list.count * part / kScoreParts, end = list.count * (part + 1) / kScoreParts;

  QueryOperands<segments> queries;
  queries.Load(p.q + row * p.q_stride + int64_t{kv_head} * group * dim, group, dim, p.scale);
  for (int i = begin + warp; i < end; i += kWarps) {
    const float2 pair = ScoreBlock<segments>(p, queries, slot, kv_head, list.blocks[i]);
    if (lane < 4) reinterpret_cast<float2*>(kept + (i - begin) * kTileHeads)[lane] = pair;
    list.FillBefore(i, scores, lane, 32);
  }
  if (part == kScoreParts - 1 && warp == 0) list.FillBefore(list.count, scores, lane, 32);
  __syncthreads();
  const bool softmax = p.reduction == GroupReduction::kSoftmaxSum;
  if (softmax) {
    // A warp adds up the scores of one head.
    RunningSum mine = RunningSum::Empty();
    for (int i = lane; i < end - begin; i += 32) mine.Add(kept[i * kTileHeads + warp]);
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
      mine.Add({__shfl_xor_sync(0xffffffffu, mine.largest, other),
                __shfl_xor_sync(0xffffffffu, mine.sum, other)});
    }
    if (lane == 0) sums[warp] = mine;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x < kTileHeads) {
      RunningSum all = RunningSum::Empty();
      for (int block = 0; block < kScoreParts; ++block) {
        all.Add(static_cast<const RunningSum*>(
            __cluster_map_shared_rank(&sums[0], block))[threadIdx.x]);
      }
      lse[threadIdx.x] = all.LogSumExp();
    }
    __cluster_barrier_arrive();  // all have read, before a block ends
    __cluster_barrier_wait();
  }
  for (int i = static_cast<int>(threadIdx.x); i < end - begin; i += kThreads) {
    float result = p.reduction == GroupReduction::kMax ? -INFINITY : 0.0f;
    for (int h = 0; h < group; ++h) {
      const float score = kept[i * kTileHeads + h];
      if (p.reduction == GroupReduction::kMax) {
        result = fmaxf(result, score);
      } else {
        result += softmax ? expf(score - lse[h]) : score;
      }
    }
    if (p.reduction == GroupReduction::kMean) result /= static_cast<float>(group);
    scores[list.blocks[begin + i]] = result;
  }
}

static_assert(kWarps == kTileHeads, "a warp for each head");

int KeptBytes(const RefineScoresParams& p) {
  return (p.units.capacity / kScoreParts + 1) * kTileHeads * static_cast<int>(sizeof(float));
}

bool FitsTensorCores(const RefineScoresParams& p) {
  return p.digests.type == DType::kBFloat16 && (p.digests.dim == 128 || p.digests.dim == 256) &&
         p.block_tokens % kTileRows == 0 && p.heads / p.digests.kv_heads <= kTileHeads &&
         KeptBytes(p) <= kMaxKept && HasAlignedRows(p.digests) && HasAlignedRows(p.codes);
}

}  // namespace

cudaError_t LaunchRefineScores(const RefineScoresParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.codes.dim != 2 * KeyCodeWords(p.digests.dim / 2)) return cudaErrorInvalidValue;
  if (!FitsTensorCores(p)) {
    return p.digests.type == DType::kFloat32
               ? LaunchGroupScores<CodedBlocks<float>>(p, stream)
               : LaunchGroupScores<CodedBlocks<__nv_bfloat16>>(p, stream);
  }
  const auto kernel = p.digests.dim == 256 ? RefineScoresKernel<4> : RefineScoresKernel<2>;
  const dim3 grid(kScoreParts, p.digests.kv_heads, p.rows), block(kThreads);
  const auto bytes = static_cast<size_t>(KeptBytes(p));
  return p.reduction == GroupReduction::kSoftmaxSum
             ? LaunchClusters(kernel, grid, block, dim3(kScoreParts), bytes, stream, p)
             : LaunchKernel(kernel, grid, block, bytes, stream, p);
}

}  // namespace sluice::kernels::cuda
