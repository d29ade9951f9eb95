// Merges partial results of attention. It reads every non-empty part once and writes the result:
// rows * heads * (head_dim + 1) * 4 * (parts + 1) bytes with float32 outputs. Floor: those bytes
// over the GPU's rate; in practice the time of a launch.
#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// A thread merges one element of o; neighbouring threads share their lse values.
template <typename Out>
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int64_t items = int64_t{p.rows} * p.heads;
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (element >= items * p.head_dim) return;
  const int64_t item = element / p.head_dim;
  float largest = NegativeInfinity();
  for (int part = 0; part < p.parts; ++part) {
    largest = fmaxf(largest, p.lse[part * items + item]);
  }
  float sum = 0, o = 0;
  for (int part = 0; part < p.parts; ++part) {
    const float lse = p.lse[part * items + item];
    if (lse == NegativeInfinity()) continue;
    const float weight = expf(lse - largest);
    sum += weight;
    o = fmaf(weight, p.o[part * items * p.head_dim + element], o);
  }
  StoreAs(static_cast<Out*>(p.out) + element, sum == 0 ? 0.0f : o / sum);
  if (p.out_lse != nullptr && element % p.head_dim == 0) {
    p.out_lse[item] = sum == 0 ? NegativeInfinity() : largest + logf(sum);
  }
}

}  // namespace

cudaError_t LaunchMerge(const MergeParams& p, cudaStream_t stream) {
  if (p.parts < 0 || p.rows < 0 || p.heads <= 0 || p.head_dim <= 0) return cudaErrorInvalidValue;
  const int64_t elements = int64_t{p.rows} * p.heads * p.head_dim;
  if (elements == 0) return cudaSuccess;
  const auto kernel =
      p.out_type == DType::kFloat32 ? MergeKernel<float> : MergeKernel<__nv_bfloat16>;
  const dim3 blocks(static_cast<unsigned>((elements + kThreads - 1) / kThreads));
  return LaunchKernel(kernel, blocks, dim3(kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
