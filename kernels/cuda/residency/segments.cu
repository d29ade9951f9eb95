// SegmentLists and DivideLists. Both copy a few integers with one block to a list or row; the time
// is that of two or three dependent loads.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/residency/residency.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {
namespace {

// A sink has 4 units at most, and the local tokens 24.
__global__ void __launch_bounds__(32)
    SegmentListsKernel(const __grid_constant__ SegmentListsParams p) {
  LetNextKernelStart();
  const int list = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const ListTables t(p.residency, p.slots, p.positions, list, p.kv_heads, p.unit_tokens);
  WaitForPriorKernels();
  if (t.slot < 0) {
    if (lane == 0) p.sink.counts[list] = p.local.counts[list] = 0;
    return;
  }
  const FluxionSegments segments = SegmentsOf(t.position);
  const int sinks = (segments.sink + p.unit_tokens - 1) / p.unit_tokens;
  const int first = segments.local / p.unit_tokens;
  const int end = (segments.end + p.unit_tokens - 1) / p.unit_tokens;
  const int locals = segments.local == segments.end ? 0 : end - first;
  for (int unit = lane; unit < sinks; unit += 32) {
    const bool in_ring = t.InRing(unit);
    const int place = in_ring ? unit % t.ring : *t.place_of.At(unit);
    if (!in_ring && place >= 0) t.places.At(place)[1] = t.position;
    const int64_t entry = int64_t{list} * p.sink.capacity + unit;
    p.sink.units[entry] = unit;
    p.sink_places[entry] = place;
  }
  for (int i = lane; i < locals; i += 32) {
    const int64_t entry = int64_t{list} * p.local.capacity + i;
    p.local.units[entry] = first + i;
    p.local_places[entry] = (first + i) % t.ring;
  }
  if (lane != 0) return;
  p.sink.counts[list] = sinks;
  p.local.counts[list] = locals;
}

constexpr int kDivideThreads = 256;

__global__ void __launch_bounds__(kDivideThreads)
    DivideListsKernel(const __grid_constant__ DivideListsParams p) {
  LetNextKernelStart();
  const int list = static_cast<int>(blockIdx.x), row = list / p.kv_heads;
  WaitForPriorKernels();
  const int slot = p.slots[row];
  const int count = slot < 0 ? 0 : p.from.counts[list];
  const float share =
      p.shares == nullptr || slot < 0 ? p.share : p.shares[slot * p.kv_heads + list % p.kv_heads];
  const int cut = FirstUnits(count, share);
  const int32_t* from = p.from.units + int64_t{list} * p.from.capacity;
  int32_t* first = p.first.units + int64_t{list} * p.first.capacity;
  int32_t* rest = p.rest.units + int64_t{list} * p.rest.capacity;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kDivideThreads) {
    *(i < cut ? first + i : rest + i - cut) = from[i];
  }
  if (threadIdx.x != 0) return;
  p.first.counts[list] = cut;
  p.rest.counts[list] = count - cut;
  if (slot < 0 || p.counters == nullptr) return;
  using Sum = unsigned long long;
  SparseCounters& counters = p.counters[slot];
  atomicAdd(reinterpret_cast<Sum*>(&counters.missing), static_cast<Sum>(count) * p.unit_tokens);
  atomicAdd(reinterpret_cast<Sum*>(&counters.read), static_cast<Sum>(cut) * p.unit_tokens);
}

}  // namespace

cudaError_t LaunchSegmentLists(const SegmentListsParams& p, cudaStream_t stream) {
  const int unit = p.unit_tokens;
  const bool is_unit = unit == 16 || unit == 32 || unit == 64;
  if (p.rows < 0 || p.kv_heads < 1 || !is_unit || !IsResidency(p.residency) ||
      p.residency.ring < 1 || p.sink.capacity < kFluxionSinkTokens / unit ||
      p.local.capacity < (kFluxionLocalTokens + kFluxionLargestBlock) / unit) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(SegmentListsKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(32), 0, stream, p);
}

cudaError_t LaunchDivideLists(const DivideListsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || !(p.share >= 0 && p.share <= 1) ||
      p.first.capacity < p.from.capacity || p.rest.capacity < p.from.capacity) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(DivideListsKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(kDivideThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
