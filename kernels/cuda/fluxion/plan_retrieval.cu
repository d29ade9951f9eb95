// The plan of a retrieval: a thread takes a list, and a block few of them, so that the loads of all
// lists are in flight on many multiprocessors. A list reads 20 bytes for each of its query heads,
// so the operator's time is the latency of memory, three times.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 32;

struct Plan {
  int level = -1;
  int64_t volume = 0;
};

// Plans for the query heads of one list.
__device__ __forceinline__ Plan PlanOf(const PlanRetrievalParams& p,
                                       const FluxionSegments& segments, int64_t first_head,
                                       int group) {
  int64_t volumes[kFluxionLevels] = {};
  bool reads = false;
#pragma unroll 4
  for (int g = 0; g < group; ++g) {
    const float* const budgets = p.budgets + (first_head + g) * kFluxionLevels;
    const bool streams = p.streaming[first_head + g] != 0;
    reads = reads || !streams;
#pragma unroll
    for (int level = 0; level < kFluxionLevels; ++level) {
      const int64_t blocks = BlocksOfShare(segments, level, budgets[level]);
      volumes[level] += streams ? 0 : LevelTokens(level) * blocks;
    }
  }
  Plan plan;
#pragma unroll
  for (int level = 0; level < kFluxionLevels; ++level) {
    const int64_t volume = volumes[level] + CpuBlocks(segments, level);
    const bool better =
        level >= p.first_level && level <= p.last_level && (plan.level < 0 || volume < plan.volume);
    if (reads && better) plan = {level, volume};
  }
  return plan;
}

__global__ void __launch_bounds__(kThreads)
    PlanRetrievalKernel(const __grid_constant__ PlanRetrievalParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int list = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (list >= p.rows * p.kv_heads) return;
  const int group = p.heads / p.kv_heads, row = list / p.kv_heads;
  const int64_t first_head = int64_t{list} * group;
  FluxionSegments segments;
  if (p.slots[row] >= 0) segments = SegmentsOf(p.positions[row]);
  Plan plan;
  if (CpuTokens(segments) > 0) plan = PlanOf(p, segments, first_head, group);
  p.levels[list] = plan.level;
  p.volumes[list] = static_cast<int32_t>(plan.volume);
#pragma unroll 4
  for (int64_t head = first_head; head < first_head + group; ++head) {
    int blocks = 0;
    if (plan.level >= 0 && p.streaming[head] == 0) {
      blocks = BlocksOfShare(segments, plan.level, p.budgets[head * kFluxionLevels + plan.level]);
    }
    p.blocks[head] = blocks;
  }
}

}  // namespace

cudaError_t LaunchPlanRetrieval(const PlanRetrievalParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0 ||
      p.first_level < 0 || p.first_level > p.last_level || p.last_level >= kFluxionLevels) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const int blocks = (p.rows * p.kv_heads + kThreads - 1) / kThreads;
  return LaunchKernel(PlanRetrievalKernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                      stream, p);
}

}  // namespace sluice::kernels::cuda
