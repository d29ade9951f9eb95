// Grouped products for shapes and addresses that the copy engine cannot read: a warp computes
// each element of y and reads k elements of W and of x. Bits: lane l adds up k = l, l + 32, ...,
// then the lanes are added pairwise.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/linear/grouped_product.h"
#include "kernels/e4m3.h"
#include "kernels/fp8_pairs.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFeatures = kThreads / 32;
constexpr int kMostRowBlocks = 256;

__device__ float Bf16Value(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

__device__ float Weight(const WeightMatrix& w, int64_t row, int i) {
  const int64_t at = row * w.k + (w.layout == kFp8Pairs ? PairedPlace(i) : i);
  if (w.layout == WeightLayout::kRowMajor) return Bf16Value(w.data[at]);
  const int64_t columns = (w.k + kFp8BlockColumns - 1) / kFp8BlockColumns;
  return E4M3ToFloat(reinterpret_cast<const uint8_t*>(w.data)[at]) *
         w.scales[row / kFp8BlockRows * columns + i / kFp8BlockColumns];
}

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ uint16_t RoundToBf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Grid: (features, rows, groups).
__global__ void __launch_bounds__(kThreads) PlainProduct(const GroupedProduct p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int feature = static_cast<int>(blockIdx.x) * kFeatures + threadIdx.x / 32;
  const int64_t group = blockIdx.z;
  if (feature >= p.n) return;
  const int lane = threadIdx.x % 32;
  const int first = p.pairs != nullptr ? p.begins[group] : 0;
  const int end = p.pairs != nullptr ? p.begins[group + 1] : p.rows;
  for (int i = first + static_cast<int>(blockIdx.y); i < end; i += gridDim.y) {
    const int64_t row = p.pairs != nullptr ? p.pairs[i] : i;
    const int64_t x_row = p.pairs != nullptr ? row / p.pairs_per_row : row;
    const uint16_t* x = p.x + x_row * p.x_stride + group * p.x_group_stride;
    float sum = 0;
    for (int j = lane; j < p.w.k; j += 32) {
      sum = fmaf(Weight(p.w, group * p.n + feature, j), Bf16Value(x[j]), sum);
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane != 0) continue;
    if (p.bias != nullptr) sum += p.bias[feature];
    const int64_t place = row * p.y_stride + group * p.y_group_stride + feature;
    if (p.y_type == DType::kBFloat16) {
      static_cast<uint16_t*>(p.y)[place] = RoundToBf16(sum);
    } else {
      float* y = static_cast<float*>(p.y) + place;
      *y = p.accumulate ? sum + *y : sum;
    }
  }
}

}  // namespace

cudaError_t LaunchPlainProduct(const GroupedProduct& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.n + kFeatures - 1) / kFeatures),
                  static_cast<unsigned>(std::min(p.rows, kMostRowBlocks)),
                  static_cast<unsigned>(p.groups));
  return LaunchKernel(PlainProduct, grid, dim3(kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
