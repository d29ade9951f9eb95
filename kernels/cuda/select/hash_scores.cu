// Scores of hash codes (kernels/hash_params.h), exact: of each key the bits in which it differs
// from the group's queries, times its length.
//
// Bytes: 34 a token and list at 256 bits, and 4 for its score: 22 us for ten rows of 64K tokens and
// 8 KV heads at 4.3 TB/s, if every list is wanted. Operations: a plane's population count for each
// word. A query group of 4 has 3 planes, one of 5 has 3 and the key's own count: 24 and 32 counts a
// token, at 16 a cycle and multiprocessor 3.7 TB/s of such bytes, so counts bind before HBM does.
//
// The weight of a key's bit in a score is group - 2 * the number of queries that have it set. Its
// half, rounded up, is a small signed number; plane i has bit i of that number for every bit of the
// code, the last plane its sign. A block makes the planes of its list, and each of its threads
// takes four keys at a time.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // keys of a thread at a time
constexpr int kBlockTokens = 2 * kEach * kThreads;
constexpr int kMaxWords = kMaxHashBits / 32;
constexpr int kMaxPlanes = 8;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Planes {
  uint32_t plane[kMaxWords][kMaxPlanes];
  int set;  // bits that the group's queries have set
};

// Makes the planes, a warp a word.
__device__ void MakePlanes(const int32_t* codes, int group, int words, int planes, Planes* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, w = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) out->set = 0;
  __syncthreads();
  if (w < words) {
    int count = 0;
    for (int i = 0; i < group; ++i) {
      count += static_cast<int>(static_cast<uint32_t>(codes[i * words + w]) >> lane & 1u);
    }
    const int half = (group - 2 * count + group % 2) / 2;
    for (int i = 0; i < planes; ++i) {
      const uint32_t plane = __ballot_sync(kAllLanes, half >> i & 1);
      if (lane == 0) out->plane[w][i] = plane;
    }
    for (int s = 16; s > 0; s /= 2) count += __shfl_xor_sync(kAllLanes, count, s);
    if (lane == 0) atomicAdd(&out->set, count);
  }
  __syncthreads();
}

// Adds a word of kEach keys to their sums: 4 * the planes' counts, less twice the key's own.
template <bool odd>
__device__ __forceinline__ void AddWord(const uint32_t (&word)[kEach], const uint32_t* plane,
                                        int planes, int (&sums)[kEach]) {
  for (int i = 0; i < planes; ++i) {
    const uint32_t of_plane = plane[i];
    const int weight = (i == planes - 1 ? -4 : 4) << i;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] += weight * __popc(word[e] & of_plane);
  }
  if (odd) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] -= 2 * __popc(word[e]);
  }
}

__device__ __forceinline__ float LengthOf(const PagedRows& lengths, int slot, int token, int head) {
  return lengths.type == DType::kFloat32
             ? *RowAt<float>(lengths, slot, token, head)
             : __bfloat162float(*RowAt<__nv_bfloat16>(lengths, slot, token, head));
}

// Grid: (lists, runs of kBlockTokens tokens).
template <bool odd, bool aligned>
__global__ void __launch_bounds__(kThreads)
    HashScoresKernel(const __grid_constant__ HashScoresParams p, int planes) {
  __shared__ Planes shared;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = p.codes.kv_heads, words = p.codes.dim, group = p.heads / kv_heads;
  const int list = static_cast<int>(blockIdx.x), row = list / kv_heads;
  const int head = list - row * kv_heads, slot = p.slots[row];
  if (slot < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) return;
  const int tokens = p.positions[row];
  const int begin = static_cast<int>(blockIdx.y) * kBlockTokens;
  float* const scores = p.scores + list * p.score_stride;
  if (begin == 0 && threadIdx.x == 0) scores[tokens] = -INFINITY;
  if (begin >= tokens) return;
  MakePlanes(p.q_codes + (int64_t{row} * p.heads + head * group) * words, group, words, planes,
             &shared);
  const int of_no_bits = group * words * 32 - 2 * shared.set;
  const int end = min(begin + kBlockTokens, tokens);
  for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += kEach * kThreads) {
    const uint32_t* at[kEach];
    int sums[kEach] = {};
    float lengths[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      // A key behind the last one is the first once more.
      const int token = first + e * kThreads < end ? first + e * kThreads : first;
      at[e] = RowAt<uint32_t>(p.codes, slot, token, head);
      lengths[e] = LengthOf(p.lengths, slot, token, head);
    }
    if (aligned) {
      for (int w = 0; w < words; w += 4) {
        uint4 quad[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) quad[e] = *reinterpret_cast<const uint4*>(at[e] + w);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t word[kEach];
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            word[e] = i == 0 ? quad[e].x : i == 1 ? quad[e].y : i == 2 ? quad[e].z : quad[e].w;
          }
          AddWord<odd>(word, shared.plane[w + i], planes, sums);
        }
      }
    } else {
      for (int w = 0; w < words; ++w) {
        uint32_t word[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) word[e] = at[e][w];
        AddWord<odd>(word, shared.plane[w], planes, sums);
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int token = first + e * kThreads;
      if (token < end) scores[token] = static_cast<float>(of_no_bits - sums[e]) * lengths[e];
    }
  }
}

template <bool odd, bool aligned>
cudaError_t Launch(const HashScoresParams& p, int planes, cudaStream_t stream) {
  const int64_t runs = (p.score_stride + kBlockTokens - 1) / kBlockTokens;
  return LaunchKernel(
      HashScoresKernel<odd, aligned>,
      dim3(static_cast<unsigned>(p.rows * p.codes.kv_heads), static_cast<unsigned>(runs)),
      dim3(kThreads), 0, stream, p, planes);
}

}  // namespace

cudaError_t LaunchHashScores(const HashScoresParams& p, cudaStream_t stream) {
  const int kv_heads = p.codes.kv_heads, words = p.codes.dim;
  if (p.rows < 0 || kv_heads < 1 || p.heads < kv_heads || p.heads % kv_heads != 0 || words < 1 ||
      words > kMaxWords || p.codes.rows_per_page < 1 || p.lengths.rows_per_page < 1 ||
      p.score_stride < 1 || p.score_stride > int64_t{65535} * kBlockTokens) {
    return cudaErrorInvalidValue;
  }
  const int group = p.heads / kv_heads;
  int planes = 2;
  while ((1 << (planes - 1)) - 1 < (group + 1) / 2) ++planes;
  if (planes > kMaxPlanes) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = words % 4 == 0 && HasAlignedRows(p.codes);
  if (group % 2 != 0) {
    return aligned ? Launch<true, true>(p, planes, stream) : Launch<true, false>(p, planes, stream);
  }
  return aligned ? Launch<false, true>(p, planes, stream) : Launch<false, false>(p, planes, stream);
}

}  // namespace sluice::kernels::cuda
