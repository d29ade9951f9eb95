// HGCA's moving average of attention weights. Reads K of the lists' tokens once, 2 * head_dim bytes
// each with a bf16 cache, and reads and writes 4 bytes of average; floor: those bytes over the
// GPU's read rate, or the L2 cache's where attention has just read them.
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/unit_list.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 8;   // of a warp, to a token
constexpr int kTokens = 2;  // of a thread, at a time
constexpr int kPiece = 8;   // elements that a thread takes of a key at a time
constexpr int kHeads = 8;   // query heads at a time
constexpr int kBlockTokens = kWarps * (32 / kLanes) * kTokens;

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

// Blocks are (list, kBlockTokens of its tokens). Eight lanes share a token and kTokens of them at a
// time; a lane takes every eighth piece of its keys.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    MovingAverageKernel(const __grid_constant__ MovingAverageParams p) {
  extern __shared__ __align__(16) float queries[];  // [heads of the group][head_dim]
  const PagedCache& c = p.cache;
  const int dim = c.head_dim, group = p.heads / c.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / c.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % c.kv_heads;
  const int thread = static_cast<int>(threadIdx.x), part = thread % kLanes;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int slot = p.slots[row];
  const UnitList list = UnitListOf(p, row, kv_head);
  const int begin = static_cast<int>(blockIdx.y) * kBlockTokens;
  if (begin >= list.tokens) return;
  const float* q = p.q + row * p.q_stride + int64_t{kv_head} * group * dim;
  for (int i = thread; i < group * dim; i += 32 * kWarps) queries[i] = q[i];
  __syncthreads();

  // Past the list's end a thread takes the last token along, and drops it.
  const int first = begin + thread / kLanes * kTokens;
  int64_t token[kTokens];
  const T* key[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    token[t] = Min(first + t, list.tokens - 1);
    key[t] =
        static_cast<const T*>(c.base) + KeyIndex(c, slot, PlaceOfToken(list, token[t]), kv_head);
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
  if (part != 0) return;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (first + t >= list.tokens) break;
    const float weight =
        p.reduction == GroupReduction::kMax ? largest[t] : sum[t] / static_cast<float>(group);
    auto* const average =
        reinterpret_cast<float*>(static_cast<char*>(p.average.base) +
                                 RowOffset(p.average, slot, PlaceOfToken(list, token[t]), kv_head));
    const bool own = PositionOfToken(list, token[t]) == p.positions[row];
    *average = own ? weight : fmaf(p.alpha, weight, (1.0f - p.alpha) * *average);
  }
}

}  // namespace

cudaError_t LaunchMovingAverage(const MovingAverageParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  if (p.rows < 0 || c.kv_heads <= 0 || p.heads <= 0 || p.heads % c.kv_heads != 0 ||
      c.head_dim <= 0 || c.head_dim > 256 || c.head_dim % 16 != 0 || c.block_tokens <= 0 ||
      p.unit_tokens <= 0 || p.capacity < 0 || p.reduction == GroupReduction::kSoftmaxSum) {
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
