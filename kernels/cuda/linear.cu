// LaunchLinear: which kernel computes which rows.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_decode.h"
#include "kernels/cuda/linear_prompt.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kPlainThreads = 256;
constexpr int kPlainRowsAtOnce = 65535;  // the grid's limit

__device__ float Bf16ToFloat(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

// y = x W^T for shapes that the copy engine cannot read: a warp for each element of y, which reads
// 2k bytes of W and of x. Bits: lane l adds up k = l, l + 32, ..., then the lanes pairwise.
__global__ void __launch_bounds__(kPlainThreads) PlainProduct(const LinearParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int feature = static_cast<int>(blockIdx.x) * (kPlainThreads / 32) + threadIdx.x / 32;
  if (feature >= p.w.n) return;
  const int lane = threadIdx.x % 32;
  const uint16_t* w = p.w.data + static_cast<int64_t>(feature) * p.w.k;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.w.k;
    float sum = 0;
    for (int i = lane; i < p.w.k; i += 32) sum = fmaf(Bf16ToFloat(w[i]), Bf16ToFloat(x[i]), sum);
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane != 0) continue;
    float* y = p.y + row * p.w.n + feature;
    if (p.bias != nullptr) sum += p.bias[feature];
    *y = p.accumulate ? sum + *y : sum;
  }
}

cudaError_t LaunchPlainProduct(const LinearParams& p, cudaStream_t stream) {
  constexpr int kFeatures = kPlainThreads / 32;
  const dim3 grid(static_cast<unsigned>((p.w.n + kFeatures - 1) / kFeatures),
                  static_cast<unsigned>(std::min(p.rows, kPlainRowsAtOnce)));
  return LaunchKernel(PlainProduct, grid, dim3(kPlainThreads), 0, stream, p);
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether the rows of W and x can be copied as tiles, and those of y written 16 bytes at a time.
// True for every row of a buffer if it is true for its first.
bool IsTiled(const LinearParams& p) {
  return p.w.k % 8 == 0 && p.w.k >= 64 && p.w.n % 4 == 0 && IsAligned(p.w.data) && IsAligned(p.x) &&
         IsAligned(p.y);
}

LinearParams RowsOf(const LinearParams& p, int32_t first, int32_t rows) {
  LinearParams some = p;
  some.x = static_cast<const uint16_t*>(p.x) + int64_t{first} * p.w.k;
  some.y = p.y + int64_t{first} * p.w.n;
  some.rows = rows;
  some.decode_rows = 0;
  return some;
}

}  // namespace

cudaError_t LaunchLinear(const LinearParams& p, cudaStream_t stream) {
  if (p.w.n <= 0 || p.w.k <= 0 || p.rows < 0 || p.decode_rows < 0 || p.decode_rows > p.rows ||
      p.x_type != DType::kBFloat16 || p.w.layout != WeightLayout::kRowMajor) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (!IsTiled(p)) return LaunchPlainProduct(p, stream);
  if (p.decode_rows > 0) {
    const cudaError_t error = LaunchDecodeProduct(RowsOf(p, 0, p.decode_rows), stream);
    if (error != cudaSuccess) return error;
  }
  if (p.decode_rows == p.rows) return cudaSuccess;
  return LaunchPromptProduct(RowsOf(p, p.decode_rows, p.rows - p.decode_rows), stream);
}

}  // namespace sluice::kernels::cuda
