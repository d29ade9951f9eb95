// Scores of shortlisted blocks from their key codes.
//
// The kernel moves, for each block of the shortlist, its digest, 4 * head_dim bytes, and the codes
// of its tokens, head_dim / 4 bytes each: 1.5 KB for blocks of 32 and a head_dim of 128, 16 MB for
// 10 rows of Qwen3-14B (80 lists of 128 blocks), 4 us at 4.1 TB/s. The work is to make operands of
// codes: some 500 instructions a warp and block, of which 320 are integer operations at half the
// rate, 5 M for those lists. That is 9 us if every scheduler of an H200 were busy; measured alone:
// 27 us (README.md). It runs beside products, which leave little room: a block has 128 threads and
// some 20 KB of shared memory.
//
// A warp takes a block at a time, and the next two are on their way to shared memory meanwhile. The
// score of a token is q * middle, the same for all of a block, + sum of (q * range) * level. The
// levels of 16 tokens are the A operand of a tensor-core tile, made in registers: a level is one of
// four bf16 that differ in the sign and in one bit of the exponent, so that two of them take two
// shifts and two logic operations. The B operand is q * range of up to 8 heads, once for a block.
// The position of an element in k does not matter as long as both operands have it in the same one.
//
// The thread blocks of a list take equal runs of its shortlist, and keep the scores of each head
// in shared memory. For sums of softmax they are a cluster, and exchange their sums in between. A
// score is a chain of its own, whichever block computes it, and sums are added in order.
#include <algorithm>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/select/coded_blocks.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 16;
constexpr int kTileHeads = 8;
constexpr int kSegment = 32;  // elements of a key that four lanes make at a time
constexpr int kStages = 3;    // blocks of a warp that are on their way or being scored
constexpr int kMaxShared = 48 << 10;

// In bf16, an inner level is 0.25 and an outer one is 1: one bit of the exponent tells them apart.
constexpr uint32_t kInnerPair = 0x3e803e80u, kOuterBits = 0x01000100u, kSignBits = 0x80008000u;
static_assert(kOuterLevel == 4 * kInnerLevel, "levels differ by one bit of the exponent");

__device__ __forceinline__ uint32_t SubtractPairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 x = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                   *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}
__device__ __forceinline__ uint32_t MultiplyPairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 x = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                   *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&x);
}
// Returns a + b / 2, whose halving is exact.
__device__ __forceinline__ uint32_t AddHalf(uint32_t a, uint32_t b) {
  const __nv_bfloat162 x =
      __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&b), __float2bfloat162_rn(0.5f),
              *reinterpret_cast<const __nv_bfloat162*>(&a));
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Makes a lane's levels of a token's segment from its words, shifted so that the bits of element i
// of the lane's first half are bits 12 + i, and those of the second half bits 28 + i.
__device__ __forceinline__ void MakeLevels(uint32_t upper, uint32_t outer, uint32_t (&levels)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t level = ((outer >> (4 + i)) & kOuterBits) ^ kInnerPair;
    levels[i] = (~(upper << (3 - i)) & kSignBits) ^ level;
  }
}

// The queries of up to 8 heads as B operands, in registers: bf16, scaled. A lane has elements
// [4 c, 4 c + 4) of a segment, with c = lane % 4, and those 16 further: pair i is elements 4 c + i
// and 16 + 4 c + i.
//
// `outer` is q times the outer level. Scores are in units of log 2, so that sums need no
// multiplications.
template <int segments>
struct QueryOperands {
  uint32_t pairs[segments][4], outer[segments][4];

  __device__ void Load(const float* q, int heads, int dim, float scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int s = 0; s < segments; ++s) {
      const float* from = q + min(lane / 4, heads - 1) * dim + s * kSegment + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = lane / 4 < heads ? from[i] * scale : 0.0f;
        const float b = lane / 4 < heads ? from[16 + i] * scale : 0.0f;
        pairs[s][i] = PackBf16(a, b);
        outer[s][i] = PackBf16(a * kOuterLevel, b * kOuterLevel);
      }
    }
  }
};

// Pair i of the result: elements i of `a` and of `b`, four bf16 each.
__device__ __forceinline__ void Zip(const uint2& a, const uint2& b, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(a.x, b.x, 0x5410);
  pairs[1] = __byte_perm(a.x, b.x, 0x7632);
  pairs[2] = __byte_perm(a.y, b.y, 0x5410);
  pairs[3] = __byte_perm(a.y, b.y, 0x7632);
}

// Log-sum-exps of two heads' scores, which lie in the lanes with the same lane % 4.
struct HeadScores {
  RunningSum a = RunningSum::Empty(), b = RunningSum::Empty();

  __device__ __forceinline__ void Add(const float (&c)[4]) {
    AddTwo(a, c[0], c[2]);
    AddTwo(b, c[1], c[3]);
  }
  // Adds up all lanes with the same lane % 4.
  __device__ __forceinline__ float2 Reduce() const {
    float top_a = a.largest, top_b = b.largest;
#pragma unroll
    for (int other = 4; other < 32; other *= 2) {
      top_a = fmaxf(top_a, __shfl_xor_sync(0xffffffffu, top_a, other));
      top_b = fmaxf(top_b, __shfl_xor_sync(0xffffffffu, top_b, other));
    }
    float sum_a = a.sum * Exp2(a.largest - top_a);
    float sum_b = b.sum * Exp2(b.largest - top_b);
#pragma unroll
    for (int other = 4; other < 32; other *= 2) {
      sum_a += __shfl_xor_sync(0xffffffffu, sum_a, other);
      sum_b += __shfl_xor_sync(0xffffffffu, sum_b, other);
    }
    return {kLog2 * (top_a + __log2f(sum_a)), kLog2 * (top_b + __log2f(sum_b))};
  }

 private:
  static constexpr float kLog2 = 0.693147181f;
  __device__ __forceinline__ static void AddTwo(RunningSum& sum, float x, float y) {
    const float top = fmaxf(sum.largest, fmaxf(x, y));
    sum.sum = fmaf(sum.sum, Exp2(sum.largest - top), Exp2(x - top) + Exp2(y - top));
    sum.largest = top;
  }
};

// A block's digest and the codes of its tokens in shared memory.
template <int segments>
struct StagedBlock {
  static constexpr int kDigestBytes = segments * kSegment * 4;
  static constexpr int kTokenBytes = segments * 8;
  const unsigned char* at;

  static __host__ __device__ int Bytes(int block_tokens) {
    return kDigestBytes + block_tokens * kTokenBytes;
  }

  // Computes the log-sum-exps of the block's scores for heads lane % 4 * 2 and the next. Called by
  // a warp.
  __device__ float2 Score(const QueryOperands<segments>& queries, int block_tokens) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, c = lane % 4;
    // q * range * 0.4, the B operand that levels of 0.25 and 1 are multiplied by, and the score of
    // the middle of the range, which is the same for all tokens.
    uint32_t ranges[segments][4];
    float middle[4] = {}, odd_middle[4] = {};
#pragma unroll
    for (int s = 0; s < segments; ++s) {
      const unsigned char* const least = at + s * kSegment * 2 + c * 8;
      const unsigned char* const largest = least + kDigestBytes / 2;
      uint32_t a[4], b[4], centers[4];
      Zip(*reinterpret_cast<const uint2*>(least), *reinterpret_cast<const uint2*>(least + 32), a);
      Zip(*reinterpret_cast<const uint2*>(largest), *reinterpret_cast<const uint2*>(largest + 32),
          b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t range = SubtractPairs(b[i], a[i]);
        centers[i] = AddHalf(a[i], range);
        ranges[s][i] = MultiplyPairs(range, queries.outer[s][i]);
      }
      const uint32_t first[4] = {centers[0], centers[0], centers[1], centers[1]};
      const uint32_t second[4] = {centers[2], centers[2], centers[3], centers[3]};
      MultiplyAdd(middle, first, queries.pairs[s][0], queries.pairs[s][1]);
      MultiplyAdd(odd_middle, second, queries.pairs[s][2], queries.pairs[s][3]);
    }
    middle[0] += odd_middle[0];
    middle[1] += odd_middle[1];
    HeadScores scores;
    const unsigned char* row = at + kDigestBytes + lane / 4 * kTokenBytes;
    for (int tile = 0; tile < block_tokens; tile += kTileRows, row += kTileRows * kTokenBytes) {
      float sums[4] = {middle[0], middle[1], middle[0], middle[1]};
      float odd[4] = {};
      // Words of the upper row and of the lower one: of the upper half, then of the outer quarters.
      uint32_t words[2][2 * segments];
#pragma unroll
      for (int i = 0; i < segments / 2; ++i) {
        LoadWords(row + 16 * i, words[0] + 4 * i);
        LoadWords(row + 8 * kTokenBytes + 16 * i, words[1] + 4 * i);
      }
#pragma unroll
      for (int s = 0; s < segments; ++s) {
        uint32_t upper_row[4], lower_row[4];
        const int shift = 12 - 4 * c;
        MakeLevels(words[0][s] << shift, words[0][segments + s] << shift, upper_row);
        MakeLevels(words[1][s] << shift, words[1][segments + s] << shift, lower_row);
        const uint32_t first[4] = {upper_row[0], lower_row[0], upper_row[1], lower_row[1]};
        const uint32_t second[4] = {upper_row[2], lower_row[2], upper_row[3], lower_row[3]};
        MultiplyAdd(sums, first, ranges[s][0], ranges[s][1]);
        MultiplyAdd(odd, second, ranges[s][2], ranges[s][3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += odd[i];
      scores.Add(sums);
    }
    return scores.Reduce();
  }

 private:
  __device__ __forceinline__ static void LoadWords(const unsigned char* from, uint32_t* to) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
};

// The blocks of a warp, every kWarps-th from entry `begin` on, on their way to shared memory.
template <int segments>
struct BlockQueue {
  const RefineScoresParams& p;
  const Shortlist& list;
  int slot, kv_head, begin, end;
  unsigned char* stages;  // [kStages][bytes]
  int bytes;              // of a stage
  float* scores;          // of the list
  // This lane has one of the 32 next entries: its block, the first block behind the entry before,
  // and where the block's digest and codes lie.
  int block = 0, gap = 0;
  const unsigned char* digest = nullptr;
  const unsigned char* codes = nullptr;

  // Looks up where the blocks of entries n, n + 1, ..., n + 31 of the warp lie.
  __device__ void LookUp(int n) {
    const int i = begin + (n + static_cast<int>(threadIdx.x) % 32) * kWarps;
    if (i >= end) return;
    block = list.blocks[i];
    gap = i == 0 ? 0 : list.blocks[i - 1] + 1;
    digest = reinterpret_cast<const unsigned char*>(
        RowAt<__nv_bfloat16>(p.digests, slot, block, kv_head));
    codes = reinterpret_cast<const unsigned char*>(
        RowAt<uint32_t>(p.codes, slot, block * p.block_tokens, kv_head));
  }

  // Starts the copy of entry n, if there is one, and writes -inf to the blocks between the entry
  // before and its own. Calls must be in the order of n.
  __device__ void Start(int n) {
    if (n % 32 == 0) LookUp(n);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (begin + n * kWarps < end) {
      const auto of_entry = [&](const unsigned char* at) {
        return reinterpret_cast<const unsigned char*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(at), n % 32));
      };
      const unsigned char* const from_digest = of_entry(digest);
      const unsigned char* const from_codes = of_entry(codes);
      unsigned char* const to = stages + n % kStages * bytes;
      constexpr int kDigest = StagedBlock<segments>::kDigestBytes;
      for (int at = lane * 16; at < bytes; at += 32 * 16) {
        CopyAsync(to + at, at < kDigest ? from_digest + at : from_codes + at - kDigest);
      }
      const int end_of_gap = __shfl_sync(0xffffffffu, block, n % 32);
      const int first = __shfl_sync(0xffffffffu, gap, n % 32);
      for (int unit = first + lane; unit < end_of_gap; unit += 32) scores[unit] = -INFINITY;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Waits for entry n; kStages - 1 later ones have been started.
  __device__ StagedBlock<segments> Wait(int n) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
    return {stages + n % kStages * bytes};
  }

 private:
  __device__ static void CopyAsync(unsigned char* to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
  }
};

int KeptBytes(const RefineScoresParams& p, int parts) {
  return (p.units.capacity / parts + 1) * kTileHeads * static_cast<int>(sizeof(float));
}

// Grid: (blocks that share a list, KV heads, rows); for sums of softmax these blocks are a cluster.
// Shared memory: the stages of every warp, then scores of this block's entries, [capacity / parts
// + 1][kTileHeads].
template <int segments>
__global__ void __launch_bounds__(kThreads)
    RefineScoresKernel(const __grid_constant__ RefineScoresParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
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
  const int part = static_cast<int>(blockIdx.x), parts = static_cast<int>(gridDim.x);
  const int begin = list.count * part / parts, end = list.count * (part + 1) / parts;
  const int bytes = StagedBlock<segments>::Bytes(p.block_tokens);
  auto* const kept = reinterpret_cast<float*>(shared + kWarps * kStages * bytes);

  unsigned char* const stages = shared + warp * kStages * bytes;
  BlockQueue<segments> queue{p, list, slot, kv_head, begin + warp, end, stages, bytes, scores};
  for (int n = 0; n + 1 < kStages; ++n) queue.Start(n);
  QueryOperands<segments> queries;
  queries.Load(p.q + row * p.q_stride + int64_t{kv_head} * group * dim, group, dim,
               p.scale * 1.44269504f);
  for (int n = 0; begin + warp + n * kWarps < end; ++n) {
    const int i = begin + warp + n * kWarps;
    queue.Start(n + kStages - 1);
    const float2 pair = queue.Wait(n).Score(queries, p.block_tokens);
    if (lane < 4) reinterpret_cast<float2*>(kept + (i - begin) * kTileHeads)[lane] = pair;
    __syncwarp();  // before the next copy overwrites the stage
  }
  if (part == parts - 1 && warp == 0) list.FillBefore(list.count, scores, lane, 32);
  __syncthreads();
  const bool softmax = p.reduction == GroupReduction::kSoftmaxSum;
  if (softmax) {
    // A warp adds up the scores of a head at a time.
    for (int head = warp; head < kTileHeads; head += kWarps) {
      RunningSum mine = RunningSum::Empty();
      for (int i = lane; i < end - begin; i += 32) mine.Add(kept[i * kTileHeads + head]);
#pragma unroll
      for (int other = 1; other < 32; other *= 2) {
        mine.Add({__shfl_xor_sync(0xffffffffu, mine.largest, other),
                  __shfl_xor_sync(0xffffffffu, mine.sum, other)});
      }
      if (lane == 0) sums[head] = mine;
    }
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (threadIdx.x < kTileHeads) {
      RunningSum all = RunningSum::Empty();
      for (int block = 0; block < parts; ++block) {
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

int SharedBytes(const RefineScoresParams& p, int parts) {
  const int bytes = p.digests.dim == 256 ? StagedBlock<4>::Bytes(p.block_tokens)
                                         : StagedBlock<2>::Bytes(p.block_tokens);
  return kWarps * kStages * bytes + KeptBytes(p, parts);
}

// Returns how many blocks share a list. In all there are three for each multiprocessor, if their
// shared memory suffices: branches have priority over the step's own stream, whose next kernel
// would else wait for this one. The sums of a softmax are added by block, so there the number must
// not depend on the rows.
int PartsOf(const RefineScoresParams& p, int processors) {
  if (p.reduction == GroupReduction::kSoftmaxSum) return kScoreParts;
  int parts = std::clamp(3 * processors / (p.rows * p.digests.kv_heads), 1, kScoreParts);
  while (parts < kScoreParts && SharedBytes(p, parts) > kMaxShared) ++parts;
  return parts;
}

bool FitsTensorCores(const RefineScoresParams& p) {
  return p.digests.type == DType::kBFloat16 && (p.digests.dim == 128 || p.digests.dim == 256) &&
         p.block_tokens % kTileRows == 0 && p.codes.rows_per_page % p.block_tokens == 0 &&
         p.heads / p.digests.kv_heads <= kTileHeads && SharedBytes(p, kScoreParts) <= kMaxShared &&
         HasAlignedRows(p.digests) && HasAlignedRows(p.codes);
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
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int parts = PartsOf(p, processors);
  const auto kernel = p.digests.dim == 256 ? RefineScoresKernel<4> : RefineScoresKernel<2>;
  const dim3 grid(parts, p.digests.kv_heads, p.rows), block(kThreads);
  const auto bytes = static_cast<size_t>(SharedBytes(p, parts));
  return p.reduction == GroupReduction::kSoftmaxSum
             ? LaunchClusters(kernel, grid, block, dim3(parts), bytes, stream, p)
             : LaunchKernel(kernel, grid, block, bytes, stream, p);
}

}  // namespace sluice::kernels::cuda
