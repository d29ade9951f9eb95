// HGCA's moving average of attention weights. It reads K of the lists' tokens once, 2 * head_dim
// bytes each with a bf16 cache, and reads and writes 4 bytes of average. Floor: those bytes over
// the GPU's read rate, or the L2 cache's if attention has just read them. Measured on an H200,
// 40/8 heads of 128, 80 lists of 512 tokens (sluice-sparse-attention-bench): 10.9 us out of HBM,
// 9.4 us after the attention over the same lists; the bytes take 3 us. The difference has not
// been traced. The kernel is a chain of lookups (place, page, key, average), each waiting for the
// one before.
#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 8;   // lanes of a warp for each token
constexpr int kTokens = 2;  // tokens of a thread
constexpr int kPiece = 8;   // elements that a thread takes of a key at a time
constexpr int kHeads = 8;   // query heads at a time
constexpr int kWarpTokens = 32 / kLanes * kTokens;
constexpr int kBlockTokens = kWarps * kWarpTokens;

__device__ void LoadPiece(const float* from, float (&to)[kPiece]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0];
  const float4 b = reinterpret_cast<const float4*>(from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ void LoadPiece(const __nv_bfloat16* from, float (&to)[kPiece]) {
  const uint4 pairs = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Where a list token's key begins, in elements of the cache, and where its average lies, in
// bytes.
struct TokenPlace {
  int64_t key;
  int64_t average;
  bool counts;  // it lies in the row's context
  bool own;     // it is the row's own token
};

// Finds token v of the list. Loads that depend on nothing come first, then the loads that depend
// on those. Numbers fit 32 bits, whose divisions are short.
__device__ TokenPlace Find(const MovingAverageParams& p, int row, int kv_head, unsigned v) {
  const PagedCache& c = p.cache;
  const PagedRows& a = p.average;
  const int64_t list = int64_t{row} * c.kv_heads + kv_head;
  const unsigned unit_tokens = static_cast<unsigned>(p.unit_tokens);
  const int entry = static_cast<int>(v / unit_tokens);
  const int in_unit = static_cast<int>(v % unit_tokens);
  const bool inside = entry < p.capacity;
  const int slot = p.slots[row], position = p.positions[row], count = p.counts[list];
  int unit = entry, place = 0;
  if (p.units != nullptr && inside) unit = p.units[list * p.capacity + entry];
  if (p.places != nullptr && inside) place = p.places[list * p.capacity + entry];
  if (p.places == nullptr) place = unit;
  TokenPlace found = {};
  const int at = unit * p.unit_tokens + in_unit;
  found.counts = slot >= 0 && inside && entry < count && (p.units == nullptr || at <= position);
  if (!found.counts) return found;
  found.own = at == position;
  const auto token = static_cast<unsigned>(place * p.unit_tokens + in_unit);
  const unsigned block_tokens = static_cast<unsigned>(c.block_tokens);
  const unsigned in_block = token % block_tokens;
  unsigned block = token / block_tokens;
  if (c.ring_blocks > 0) block %= static_cast<unsigned>(c.ring_blocks);
  const unsigned page_rows = static_cast<unsigned>(a.rows_per_page);
  const int64_t page = c.block_table[slot * c.table_stride + block];
  const int64_t average_page = a.page_table[slot * a.table_stride + token / page_rows];
  found.key = page * (c.page_bytes / SizeOf(c.type)) +
              (int64_t{2} * kv_head * c.block_tokens + in_block) * c.head_dim;
  found.average = average_page * a.page_bytes + kv_head * a.head_bytes + token % page_rows * 4;
  return found;
}

// The grid is (list, kBlockTokens of its tokens). Lane l < kWarpTokens of a warp looks up token l
// of the warp's. Eight lanes share kTokens of them, and each lane takes every eighth piece of
// their keys.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    MovingAverageKernel(const __grid_constant__ MovingAverageParams p) {
  extern __shared__ __align__(16) float queries[];  // [heads of the group][head_dim]
  const PagedCache& c = p.cache;
  const int dim = c.head_dim, group = p.heads / c.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / c.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % c.kv_heads;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int part = lane % kLanes, first = lane / kLanes * kTokens;
  LetNextKernelStart();
  WaitForPriorKernels();
  const float* q = p.q + row * p.q_stride + int64_t{kv_head} * group * dim;
  for (int i = thread; i < group * dim; i += 32 * kWarps) queries[i] = q[i];
  const unsigned begin = blockIdx.y * kBlockTokens + static_cast<unsigned>(warp * kWarpTokens);
  const TokenPlace mine = Find(p, row, kv_head, begin + static_cast<unsigned>(lane % kWarpTokens));
  __syncthreads();
  const unsigned counted = __ballot_sync(0xffffffffu, mine.counts);
  if (counted == 0) return;

  // A token that does not count uses the key of one that does, and is dropped.
  const int64_t some_key = __shfl_sync(0xffffffffu, mine.key, __ffs(static_cast<int>(counted)) - 1);
  const T* key[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int64_t offset = __shfl_sync(0xffffffffu, mine.counts ? mine.key : some_key, first + t);
    key[t] = static_cast<const T*>(c.base) + offset;
  }
  float largest[kTokens] = {}, sum[kTokens] = {};
  for (int first_head = 0; first_head < group; first_head += kHeads) {
    const int heads = min(kHeads, group - first_head);
    float score[kTokens][kHeads] = {};
    for (int at = part * kPiece; at < dim; at += kLanes * kPiece) {
      float k[kTokens][kPiece];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) LoadPiece(key[t] + at, k[t]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        float of_head[kPiece];
        LoadPiece(queries + (first_head + h) * dim + at, of_head);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int i = 0; i < kPiece; ++i) score[t][h] = fmaf(of_head[i], k[t][i], score[t][h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      const float lse = p.lse[int64_t{row} * p.heads + kv_head * group + first_head + h];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float s = score[t][h];
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
        const float weight = expf(s * p.scale - lse);
        largest[t] = fmaxf(largest[t], weight);
        sum[t] += weight;
      }
    }
  }
  // The eight lanes of a token all have its weight. The lane that looked it up takes it from one
  // of them.
  float weight = 0;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float of_token =
        p.reduction == GroupReduction::kMax ? largest[t] : sum[t] / static_cast<float>(group);
    const float handed = __shfl_sync(0xffffffffu, of_token, lane % kWarpTokens / kTokens * kLanes);
    if (lane % kTokens == t) weight = handed;
  }
  if (lane >= kWarpTokens || !mine.counts) return;
  auto* const average = reinterpret_cast<float*>(static_cast<char*>(p.average.base) + mine.average);
  *average = mine.own ? weight : fmaf(p.alpha, weight, (1.0f - p.alpha) * *average);
}

}  // namespace

cudaError_t LaunchMovingAverage(const MovingAverageParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  if (p.rows < 0 || c.kv_heads <= 0 || p.heads <= 0 || p.heads % c.kv_heads != 0 ||
      c.head_dim <= 0 || c.head_dim > 256 || c.head_dim % 16 != 0 || c.block_tokens <= 0 ||
      p.unit_tokens <= 0 || p.average.rows_per_page <= 0 || p.capacity < 0 ||
      p.reduction == GroupReduction::kSoftmaxSum) {
    return cudaErrorInvalidValue;
  }
  const int64_t most = int64_t{p.capacity} * p.unit_tokens;  // tokens of a list
  const size_t shared = sizeof(float) * static_cast<size_t>(p.heads / c.kv_heads * c.head_dim);
  if (most > int64_t{65535} * kBlockTokens || shared > 48 << 10) return cudaErrorInvalidValue;
  if (p.rows == 0 || most == 0) return cudaSuccess;
  const auto kernel =
      c.type == DType::kFloat32 ? MovingAverageKernel<float> : MovingAverageKernel<__nv_bfloat16>;
  const dim3 grid(p.rows * c.kv_heads,
                  static_cast<unsigned>((most + kBlockTokens - 1) / kBlockTokens));
  return LaunchKernel(kernel, grid, dim3(32 * kWarps), shared, stream, p);
}

}  // namespace sluice::kernels::cuda
