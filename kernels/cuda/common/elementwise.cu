// Embedding and SwiGLU. Each makes one pass over its operands, four elements a thread.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 4 * kThreads;  // elements of a row per block

// The grid is (ceil(hidden / kTile), rows). The kernel moves 2 + 4 bytes per element, after two
// dependent reads: the row's slot and position, then its token. Measured (H100, hidden 4096,
// launches one after the other in a graph): 1.3 us at 1 and 8 rows, 1.8 us at 64, whose bytes
// take 0.65 us.
__global__ void __launch_bounds__(kThreads) EmbeddingKernel(EmbeddingParams p, bool aligned) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int row = blockIdx.y;
  const int hidden = p.table.k;
  const int i = blockIdx.x * kTile + 4 * threadIdx.x;
  const int slot = p.slots[row];
  const int position = p.positions[row];
  const int token = slot < 0 ? -1 : p.tokens[slot * p.token_stride + position];
  float4 v = {0, 0, 0, 0};
  if (token >= 0 && token < p.table.n && i < hidden) {
    const uint16_t* in = p.table.data + int64_t{token} * hidden + i;
    if (aligned) {
      const uint2 bits = *reinterpret_cast<const uint2*>(in);
      v = {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
           __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
    } else {
      const auto element = [&](int j) {
        return i + j < hidden ? __uint_as_float(uint32_t{in[j]} << 16) : 0.0f;
      };
      v = {element(0), element(1), element(2), element(3)};
    }
  }
  Store4(p.out, DType::kFloat32, int64_t{row} * hidden, i, hidden, aligned, v);
}

// Returns gate / (1 + exp(-gate)) * up. Where exp(-gate) is infinite the quotient is -0, as the
// exact value would be rounded.
__device__ __forceinline__ float SiluTimes(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

// The grid is ceil(dim / kTile) blocks for each row, one row behind the other: ranks that divide
// experts have more rows than a grid's y holds. The kernel moves 8 + 2 bytes (bf16) per element.
// Measured (as above, dim 12288): 1.0 us at 1 row, 1.2 at 8, 2.3 at 64, whose bytes would take
// 3.2 us from HBM: they are in L2.
__global__ void __launch_bounds__(kThreads) SiluMulKernel(SiluMulParams p, bool aligned) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const unsigned tiles = (p.dim + kTile - 1) / kTile;
  const int64_t row = blockIdx.x / tiles;
  const int i = static_cast<int>(blockIdx.x % tiles) * kTile + 4 * threadIdx.x;
  const float* gates = p.gate_up + row * 2 * p.dim;
  const float4 gate = Load4(gates, i, p.dim, aligned);
  const float4 up = Load4(gates + p.dim, i, p.dim, aligned);
  Store4(p.out, p.out_type, row * p.dim, i, p.dim, aligned,
         {SiluTimes(gate.x, up.x), SiluTimes(gate.y, up.y), SiluTimes(gate.z, up.z),
          SiluTimes(gate.w, up.w)});
}

// The grid's y has 16 bits.
constexpr int kMaxRows = 65535;

}  // namespace

cudaError_t LaunchEmbedding(const EmbeddingParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.rows > kMaxRows || p.table.k < 1 || p.table.n < 1 ||
      p.table.layout != WeightLayout::kRowMajor) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.table.k % 4 == 0 && AreAligned(8, p.table.data) && AreAligned(16, p.out);
  const dim3 grid((p.table.k + kTile - 1) / kTile, p.rows);
  return LaunchKernel(EmbeddingKernel, grid, kThreads, 0, stream, p, aligned);
}

cudaError_t LaunchSiluMul(const SiluMulParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.dim < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.dim % 4 == 0 && AreAligned(16, p.gate_up, p.out);
  const int64_t blocks = int64_t{p.rows} * ((p.dim + kTile - 1) / kTile);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return LaunchKernel(SiluMulKernel, static_cast<unsigned>(blocks), kThreads, 0, stream, p,
                      aligned);
}

}  // namespace sluice::kernels::cuda
