// MergeParts. It reads every part that was taken once and writes the results: group * (head_dim +
// 1) * 4 bytes for each of them. Floor: those bytes over the GPU's rate; in practice the time of a
// launch and of a few dependent loads.
#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/list_parts.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Merges one element of a list's results, [group][head_dim].
__device__ void MergeElement(const MergePartsParams& p, int list, int group, int element,
                             uint32_t taken) {
  const int elements = group * p.head_dim, head = element / p.head_dim;
  const float* const o = p.part_o + int64_t{list} * p.most_parts * elements + element;
  const float* const lse = p.part_lse + int64_t{list} * p.most_parts * group + head;
  float largest = NegativeInfinity();
  for (uint32_t left = taken; left != 0; left &= left - 1) {
    largest = fmaxf(largest, lse[(__ffs(static_cast<int>(left)) - 1) * group]);
  }
  float sum = 0, merged = 0;
  for (uint32_t left = taken; left != 0; left &= left - 1) {
    const int part = __ffs(static_cast<int>(left)) - 1;
    if (lse[part * group] == NegativeInfinity()) continue;
    const float weight = expf(lse[part * group] - largest);
    sum += weight;
    merged = fmaf(weight, o[int64_t{part} * elements], merged);
  }
  p.o[int64_t{list} * elements + element] = sum == 0 ? 0.0f : merged / sum;
  if (element % p.head_dim != 0) return;
  p.lse[int64_t{list} * group + head] = sum == 0 ? NegativeInfinity() : largest + logf(sum);
}

// A block merges a list, a thread an element at a time.
__global__ void __launch_bounds__(kThreads)
    MergePartsKernel(const __grid_constant__ MergePartsParams p) {
  LetNextKernelStart();
  const int list = static_cast<int>(blockIdx.x), group = p.heads / p.kv_heads;
  WaitForPriorKernels();
  const uint32_t taken = p.taken[list];
  __syncthreads();  // every thread has read the bits
  if (threadIdx.x == 0) p.taken[list] = 0;
  if (p.slots[list / p.kv_heads] < 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < group * p.head_dim; i += kThreads) {
    MergeElement(p, list, group, i, taken);
  }
}

}  // namespace

cudaError_t LaunchMergeParts(const MergePartsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < 1 || p.heads % p.kv_heads != 0 || p.head_dim < 1 ||
      p.most_parts < 1 || p.most_parts > kMostListParts) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(MergePartsKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
