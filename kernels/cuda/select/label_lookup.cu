// The lookup of labels (kernels/hash_params.h): a block takes a list, a warp a query head at a
// time. Bytes: queries and labels of a row once (40 KB for 40 heads of 128), and the labels of
// lists that miss once more. Its time is the latency of memory, twice.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/group_similarity.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxGroup = 256;

__device__ __forceinline__ float SumOfWarp(float x) {
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, s);
  return x;
}

// Grid: lists.
__global__ void __launch_bounds__(kThreads)
    LabelLookupKernel(const __grid_constant__ LabelLookupParams p) {
  __shared__ float sums[kMaxGroup][3];  // q . label, q . q, label . label
  __shared__ bool hit;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int list = static_cast<int>(blockIdx.x), row = list / p.kv_heads;
  const int head = list - row * p.kv_heads, slot = p.slots[row];
  const int group = p.heads / p.kv_heads, of_group = group * p.head_dim;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  if (slot < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) {
    if (thread == 0) p.missed[list] = slot < 0 ? 0 : p.others;
    return;
  }
  const float* const q = p.q + row * p.q_stride + int64_t{head} * of_group;
  float* const label = p.labels + (int64_t{slot} * p.kv_heads + head) * of_group;
  int32_t* const labelled = p.labelled + int64_t{slot} * p.kv_heads + head;
  for (int i = thread / 32; i < group; i += kWarps) {
    float product = 0, qq = 0, ll = 0;
    for (int d = lane; d < p.head_dim; d += 32) {
      const float a = q[i * p.head_dim + d], b = label[i * p.head_dim + d];
      product = fmaf(a, b, product);
      qq = fmaf(a, a, qq);
      ll = fmaf(b, b, ll);
    }
    product = SumOfWarp(product);
    qq = SumOfWarp(qq);
    ll = SumOfWarp(ll);
    if (lane == 0) {
      sums[i][0] = product;
      sums[i][1] = qq;
      sums[i][2] = ll;
    }
  }
  __syncthreads();
  if (thread == 0) {
    const int position = p.positions[row], age = LabelAge(p, position);
    hit = *labelled >= 0 && *labelled < position && (age == 0 || position - *labelled < age);
    if (hit) {
      GroupSimilarity similarity;
      for (int i = 0; i < group; ++i) {
        similarity.Add(sums[i][0], sums[i][1], sums[i][2], p.importance[head * group + i]);
      }
      hit = similarity.IsAtLeast(p.thresholds[head], p.rule);
    }
    p.missed[list] = hit ? 0 : 1;
    if (!hit) *labelled = position;
    if (p.counters != nullptr) {
      const auto count = [](int64_t* counter) {
        atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
      };
      count(&p.counters[slot].lookups);
      if (!hit) count(&p.counters[slot].misses);
    }
  }
  __syncthreads();
  if (hit) return;
  for (int d = thread; d < of_group; d += kThreads) label[d] = q[d];
}

}  // namespace

cudaError_t LaunchLabelLookup(const LabelLookupParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0 ||
      p.heads / p.kv_heads > kMaxGroup || p.head_dim < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(LabelLookupKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
