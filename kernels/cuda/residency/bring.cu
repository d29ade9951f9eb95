// Bring: a cluster of up to 8 thread blocks selects for a list and gives places (bring.cuh has the
// parts). Lists that select are taken first, by the clusters in turn; the others are only listed, a
// block each.
//
// Bytes: 4 a token of scores, 4 of its place if it is selected, 8 to 16 a place: 1 us for 14 rows
// of 32K of which one list in five selects, where the operator takes 47 on an H200. The time is
// that of dependent loads and of some eight barriers of a cluster (README.md has it by parts). As
// four operators in turn it was that of each one's launch, arguments, lists and tables besides, and
// beside products, which keep memory busy, each such load takes microseconds.
#include "kernels/cuda/residency/bring_job.cuh"

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = kBringThreads;
constexpr int kAtOnce = kBringAtOnce;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxBlocks = 8;       // blocks of a cluster, on any device
constexpr int kKeptScores = 20480;  // scores of a block
constexpr int kLeastTokens = 2048;  // tokens of a block, if there is a choice
constexpr int kMaxShared = 227 * 1024;

// Finds the `number`-th list that is wanted, from 0. Returns -1 if there are fewer. All threads
// call it.
__device__ int FindJob(const BringParams& p, int number, BringShared& shared) {
  const int lists = p.select.rows * p.select.kv_heads;
  __syncthreads();  // everybody has read the last job
  if (threadIdx.x == 0) shared.job = -1;
  for (int first = 0, found = 0; first < lists && found <= number; first += kThreads) {
    const int list = first + static_cast<int>(threadIdx.x);
    const bool wanted = list < lists && IsWanted(p.select, list, list / p.select.kv_heads);
    const BlockSum sum = ScanBlock(wanted ? 1 : 0, shared.select.totals);
    if (wanted && found + static_cast<int>(sum.before) == number) shared.job = list;
    found += static_cast<int>(sum.total);
  }
  __syncthreads();
  return shared.job;
}

// Lists every token of a list that has a place.
__device__ void ListAll(const BringParams& p, const ListTables& t, int list, uint32_t* totals) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{list} * p.resident.capacity;
  // By place, or by token.
  const int end = p.by_place ? t.count : t.position + 1;
  int listed = 0;
  for (int from = 0; from < end; from += kAtOnce * kThreads) {
    int unit[kAtOnce], place[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = from + j * kThreads + thread;
      unit[j] = place[j] = at;
      if (at >= end) {
        place[j] = -1;
      } else if (!p.by_place) {
        place[j] = t.InRing(at) ? at % t.ring : *t.place_of.At(at);
      } else {
        unit[j] = at < t.ring ? t.UnitInRing(at) : t.places.At(at)[0];
        if (unit[j] < 0 || (at >= t.ring && t.InRing(unit[j]))) place[j] = -1;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (from + j * kThreads >= end) break;
      const BlockSum sum = ScanBlock(place[j] >= 0 ? 1 : 0, totals);
      if (listed + static_cast<int>(sum.total) > p.resident.capacity) __trap();
      if (place[j] >= 0) {
        const int at = listed + static_cast<int>(sum.before);
        p.resident.units[first + at] = unit[j];
        p.places[first + at] = place[j];
      }
      listed += static_cast<int>(sum.total);
    }
  }
  if (thread == 0) p.resident.counts[list] = listed;
}

// Grid: clusters * blocks.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    BringKernel(const __grid_constant__ BringParams p, const __grid_constant__ BringRuns runs,
                int blocks, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  BringShared& shared = *reinterpret_cast<BringShared*>(memory);
  const int clusters = static_cast<int>(gridDim.x) / blocks;
  const int cluster = static_cast<int>(blockIdx.x) / blocks;
  const int rank = static_cast<int>(blockIdx.x) - cluster * blocks;
  WaitForPriorKernels();
  LetNextKernelStart();
  for (int number = cluster;; number += clusters) {
    const int list = FindJob(p, number, shared);
    if (list < 0) break;
    BringJob(p, list, blocks, rank, runs, room, memory).Run();
  }
  const int lists = p.select.rows * p.select.kv_heads;
  for (int list = static_cast<int>(blockIdx.x); list < lists; list += static_cast<int>(gridDim.x)) {
    const int row = list / p.select.kv_heads, slot = p.select.slots[row];
    if (threadIdx.x == 0 && slot >= 0 && list % p.select.kv_heads == 0) {
      p.counters[slot].steps += 1;
      p.counters[slot].recalls += 1;
    }
    if (IsWanted(p.select, list, row)) continue;
    if (threadIdx.x == 0 && p.move_counts != nullptr) p.move_counts[list] = 0;
    if (p.listed != nullptr && p.listed[list] == 0) continue;
    const ListTables t(p.residency, p.select.slots, p.select.positions, list, p.select.kv_heads, 1);
    if (slot >= 0 && p.whole && !t.persistent) {
      ListAll(p, t, list, shared.select.totals);
    } else if (threadIdx.x == 0) {
      p.resident.counts[list] = 0;
    }
  }
}

}  // namespace

cudaError_t LaunchBring(const BringParams& p, cudaStream_t stream) {
  const ResidencyTable& t = p.residency;
  const TopKParams& s = p.select;
  const int places = t.count - t.ring;
  if (s.rows < 0 || s.kv_heads < 1 || s.unit_tokens != 1 || s.first_units < 0 || s.last_units < 0 ||
      s.k < 1 || s.k < s.first_units + s.last_units || !IsResidency(t) ||
      places > kMaxBringPlaces) {
    return cudaErrorInvalidValue;
  }
  if (s.rows == 0) return cudaSuccess;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  static const cudaError_t roomy =
      cudaFuncSetAttribute(BringKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (error == cudaSuccess) error = roomy;
  if (error != cudaSuccess) return error;
  int blocks = kMaxBlocks;
  while (blocks > 1 && s.score_stride < int64_t{kLeastTokens} * blocks &&
         places < kLeastTokens * blocks) {
    blocks /= 2;
  }
  const int lists = s.rows * s.kv_heads;
  // A cluster for every list, or for every other one where some may not be wanted, unless the
  // arrays of so few blocks would not fit.
  const int expected = s.wanted == nullptr ? lists : (lists + 1) / 2;
  while (blocks > 1 && kBlocksPerSm * processors / blocks < expected) blocks /= 2;
  const auto bytes_without_keys = [&](int of_blocks) {
    const BringRuns of_list(s.score_stride, places, of_blocks);
    return BringArrays::Bytes(of_list.tokens, of_list.places, 0);
  };
  while (blocks < kMaxBlocks && bytes_without_keys(blocks) > kMaxShared / kBlocksPerSm) blocks *= 2;
  const int rest = bytes_without_keys(blocks);
  if (rest > kMaxShared) return cudaErrorInvalidValue;
  const BringRuns runs(s.score_stride, places, blocks);
  const int room = min(min(runs.tokens, kKeptScores), (kMaxShared - rest) / 4);
  const auto bytes = static_cast<size_t>(BringArrays::Bytes(runs.tokens, runs.places, room));
  const int clusters = min(lists, max(kBlocksPerSm * processors / blocks, 1));
  const dim3 grid(static_cast<unsigned>(clusters * blocks)), block(kThreads);
  if (blocks == 1) {
    return LaunchKernel(BringKernel, grid, block, bytes, stream, p, runs, blocks, room);
  }
  return LaunchClusters(BringKernel, grid, block, dim3(static_cast<unsigned>(blocks)), bytes,
                        stream, p, runs, blocks, room);
}

}  // namespace sluice::kernels::cuda
