// Latent attention for shapes and forms that the fast kernel does not take: float32 arithmetic on
// the CUDA cores, entries of any form. A block computes up to 8 heads of a row, a warp each, over
// tiles of 16 entries as float32 in shared memory, in the order of the list, with one running
// softmax. It reads each entry once for every 8 heads. Floor: 2 * (rank + rope + rank) operations
// per (row, head, entry) over the rate of fused multiply-adds. It is not measured: it serves
// tests of exactness and tiny models.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/mla/mla_internal.h"
#include "kernels/cuda/mla/mla_result.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 8;  // and heads of a block
constexpr int kThreads = 32 * kWarps;
constexpr int kTileEntries = 16;
constexpr int kLaneElements = kMaxMlaRank / 32;

__device__ float FloatOf(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ float FloatOf(float v) { return v; }

// Converts e4m3, except for its NaN, which nothing writes. The exponent moves to float32's
// position, and the difference in bias is made up for by a product that is exact, also for
// subnormal values.
__device__ float FloatOfE4M3(uint32_t v) {
  return __uint_as_float((v & 0x80) << 24 | (v & 0x7f) << 20) * 0x1p120f;
}

// Returns element i of an entry.
__device__ float EntryElement(const PagedLatents& c, const char* entry, int i) {
  if (c.type == DType::kFloat32) return reinterpret_cast<const float*>(entry)[i];
  if (c.type == DType::kBFloat16) return FloatOf(reinterpret_cast<const __nv_bfloat16*>(entry)[i]);
  if (i < kPackedRank) {
    const auto* scales = reinterpret_cast<const float*>(entry + kPackedRank);
    return FloatOfE4M3(static_cast<unsigned char>(entry[i])) * scales[i / kPackedScaleTokens];
  }
  const auto* rope = reinterpret_cast<const __nv_bfloat16*>(entry + kPackedRank + 16);
  return FloatOf(rope[i - kPackedRank]);
}

template <typename Out>
__device__ void WriteElements(const SparseMlaParams& p, int64_t item, const Softmax& state,
                              const float (&o)[kLaneElements], int lane) {
  const MlaResult result = ResultOf(p, item, state);
  const int rank = p.cache.rank;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const int64_t at = item * rank + i * 32 + lane;
    if (i * 32 + lane >= rank) break;
    StoreAs(static_cast<Out*>(p.out) + at,
            ElementOf(result, o[i], result.other == 0.0f ? 0.0f : p.other_o[at]));
  }
  if (lane == 0 && p.lse != nullptr) p.lse[item] = result.lse;
}

template <typename Query, typename Out>
__global__ void __launch_bounds__(kThreads)
    PlainMlaKernel(const __grid_constant__ SparseMlaParams p) {
  // The queries of the block's heads, [kWarps][width], then the tile, [kTileEntries][width].
  extern __shared__ float memory[];
  const PagedLatents& c = p.cache;
  const int width = c.rank + c.rope, row = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp;
  const int64_t item = int64_t{row} * p.heads + head;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int slot = p.slots[row];
  const int count = slot < 0 ? 0 : ListLength(p, p.counts[row]);
  float* const query = memory + warp * width;
  float* const tile = memory + kWarps * width;
  if (count > 0 && head < p.heads) {
    const Query* from = static_cast<const Query*>(p.q) + item * width;
    for (int i = lane; i < width; i += 32) query[i] = FloatOf(from[i]) * (p.scale * kLog2E);
  }

  Softmax state = {NegativeInfinity(), 0.0f};
  float o[kLaneElements] = {};
  for (int first = 0; first < count; first += kTileEntries) {
    const int entries = min(kTileEntries, count - first);
    __syncthreads();  // the tile's last readers are done
    for (int e = warp; e < entries; e += kWarps) {
      const int number =
          p.entries == nullptr ? first + e : p.entries[int64_t{row} * p.capacity + first + e];
      const int block = number / c.block_tokens;
      const int64_t page = c.block_table[slot * c.table_stride + block];
      const char* entry = static_cast<const char*>(c.base) + page * c.page_bytes +
                          (number - block * c.block_tokens) * EntryBytes(c.type, c.rank, c.rope);
      for (int i = lane; i < width; i += 32) tile[e * width + i] = EntryElement(c, entry, i);
    }
    __syncthreads();
    if (head >= p.heads) continue;
    float score = NegativeInfinity();  // score of entry `lane` of the tile
    for (int e = 0; e < entries; ++e) {
      float sum = 0;
      for (int i = lane; i < width; i += 32) sum = fmaf(query[i], tile[e * width + i], sum);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == e) score = sum;
    }
    float m = score;
    for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
    m = fmaxf(m, state.m);
    const float weight = Exp2(score - m), keep = Exp2(state.m - m);
    float sum = weight;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    state = {m, fmaf(state.l, keep, sum)};
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) o[i] *= keep;
    for (int e = 0; e < entries; ++e) {
      const float of = __shfl_sync(0xffffffffu, weight, e);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        if (i * 32 + lane < c.rank) o[i] = fmaf(of, tile[e * width + i * 32 + lane], o[i]);
      }
    }
  }
  if (head >= p.heads) return;
  if (slot >= 0) {
    WriteElements<Out>(p, item, state, o, lane);
    return;
  }
  for (int i = lane; i < c.rank; i += 32) {
    StoreAs(static_cast<Out*>(p.out) + item * c.rank + i, 0.0f);
  }
  if (lane == 0 && p.lse != nullptr) p.lse[item] = NegativeInfinity();
}

template <typename Query, typename Out>
cudaError_t Launch(const SparseMlaParams& p, cudaStream_t stream) {
  constexpr auto kKernel = PlainMlaKernel<Query, Out>;
  constexpr int kMost = (kWarps + kTileEntries) * kMaxMlaWidth * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost);
  if (error != cudaSuccess) return error;
  const size_t shared =
      sizeof(float) * (kWarps + kTileEntries) * static_cast<size_t>(p.cache.rank + p.cache.rope);
  const dim3 blocks(static_cast<unsigned>(p.rows),
                    static_cast<unsigned>((p.heads + kWarps - 1) / kWarps));
  return LaunchKernel(kKernel, blocks, dim3(kThreads), shared, stream, p);
}

template <typename Query>
cudaError_t LaunchFor(const SparseMlaParams& p, cudaStream_t stream) {
  return p.out_type == DType::kFloat32 ? Launch<Query, float>(p, stream)
                                       : Launch<Query, __nv_bfloat16>(p, stream);
}

}  // namespace

cudaError_t LaunchPlainSparseMla(const SparseMlaParams& p, cudaStream_t stream) {
  return p.q_type == DType::kFloat32 ? LaunchFor<float>(p, stream)
                                     : LaunchFor<__nv_bfloat16>(p, stream);
}

}  // namespace sluice::kernels::cuda
