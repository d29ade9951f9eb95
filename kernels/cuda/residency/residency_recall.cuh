// Recall, by one block to a list: it chooses the units that give up their places.
#pragma once

#include "kernels/cuda/residency/residency.cuh"

namespace sluice::kernels::cuda {

// Shared memory of RecallList for tables of `places` places after the ring.
struct RecallShared {
  uint64_t* stale;   // [power of two >= places] (stamp, place) of units that may be evicted
  int32_t* free;     // [places] places without a unit
  uint32_t* totals;  // scratch of ScanBlock
};
constexpr int PowerOfTwo(int at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}
constexpr int64_t RecallSharedBytes(int places) {
  return int64_t{8} * PowerOfTwo(places) + int64_t{4} * places + 4 * 32;
}
__device__ __forceinline__ RecallShared RecallSharedAt(unsigned char* memory, int places) {
  RecallShared shared;
  shared.stale = reinterpret_cast<uint64_t*>(memory);
  shared.totals = reinterpret_cast<uint32_t*>(shared.stale + PowerOfTwo(places));
  shared.free = reinterpret_cast<int32_t*>(shared.totals + 32);
  return shared;
}

// Sorts `count` keys, a power of two, in ascending order by a bitonic network. In steps of 32 and
// less a warp compares among 64 keys of its own.
__device__ __forceinline__ void SortKeys(uint64_t* keys, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int pair = static_cast<int>(threadIdx.x); pair < count / 2;
           pair += static_cast<int>(blockDim.x)) {
        const int low = 2 * pair - (pair & (step - 1)), high = low + step;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      if (step > 32 || (step == 1 && size > 32)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Returns the index of a block, or of a token's K row, in pieces of that size in `cache`. `at` is
// the unit or place. See RecallParams.
__device__ __forceinline__ int32_t PieceIndex(const PagedCache& c, int slot, int head, int at,
                                              bool token) {
  const int block = token ? at / c.block_tokens : at;
  const int piece = static_cast<int>(HeadBlock(c, slot, block, head));
  return token ? piece * 2 * c.block_tokens + (at - block * c.block_tokens) : piece;
}

// Fills shared.free and shared.stale with the places that may be given, in ascending order.
// Returns their numbers: {free, stale}.
__device__ __forceinline__ int2 FindPlaces(const ListTables& t, const RecallShared& shared) {
  int free = 0, stale = 0;  // totals of the chunks so far
  for (int first = t.ring; first < t.count; first += static_cast<int>(blockDim.x) * kListStrip) {
    const int begin = first + static_cast<int>(threadIdx.x) * kListStrip;
    int unit[kListStrip], stamp[kListStrip];
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      unit[i] = kNoPlace;
      if (begin + i >= t.count) continue;
      const int32_t* const row = t.places.At(begin + i);
      unit[i] = row[0];
      stamp[i] = row[1];
    }
    const auto is_stale = [&](int i) { return unit[i] >= 0 && stamp[i] != t.position; };
    uint32_t mine = 0;  // free, and in the upper half stale ones
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      mine += is_stale(i) ? 0x10000u : unit[i] == -1 ? 1u : 0u;
    }
    const BlockSum sum = ScanBlock(mine, shared.totals);
    int free_at = free + static_cast<int>(sum.before & 0xFFFF);
    int stale_at = stale + static_cast<int>(sum.before >> 16);
    free += static_cast<int>(sum.total & 0xFFFF);
    stale += static_cast<int>(sum.total >> 16);
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      if (is_stale(i)) {
        // Stamps are stored as unsigned numbers of the same order.
        shared.stale[stale_at++] = uint64_t{static_cast<uint32_t>(stamp[i]) ^ 0x80000000u} << 32 |
                                   static_cast<uint32_t>(begin + i);
      } else if (unit[i] == -1) {
        shared.free[free_at++] = begin + i;
      }
    }
  }
  return {free, stale};
}

__device__ __forceinline__ void RecallList(const RecallParams& p, int list,
                                           const RecallShared& shared) {
  const ListTables t(p.residency, p.slots, p.positions, list, p.kv_heads, p.unit_tokens);
  WaitForPriorKernels();
  const bool due = t.slot >= 0 && (p.due == nullptr || p.due[t.row] != 0);
  const int misses = due ? p.missing.counts[list] : 0;
  int moves = 0;
  if (misses > 0) {
    const int2 found = FindPlaces(t, shared);
    const int free = min(found.x, misses);
    moves = min(misses, found.x + found.y);
    if (moves > free) {
      const int keys = PowerOfTwo(found.y);
      for (int i = found.y + static_cast<int>(threadIdx.x); i < keys;
           i += static_cast<int>(blockDim.x)) {
        shared.stale[i] = UINT64_MAX;
      }
      __syncthreads();
      SortKeys(shared.stale, keys);
    } else {
      __syncthreads();
    }
    const int64_t first = int64_t{list} * p.missing.capacity;
    const bool tokens = p.unit_tokens == 1;
    // Evicted units and arriving units are different, so the moves need no order.
    for (int i = static_cast<int>(threadIdx.x); i < moves; i += static_cast<int>(blockDim.x)) {
      const int unit = p.missing.units[first + i];
      const int place = i < free ? shared.free[i] : static_cast<int>(shared.stale[i - free]);
      int32_t* const row = t.places.At(place);
      if (i >= free) *t.place_of.At(row[0]) = -1;
      row[0] = unit;
      row[1] = t.position;
      *t.place_of.At(unit) = place;
      p.source_units[first + i] = PieceIndex(p.home, t.slot, t.head, unit, tokens);
      p.target_units[first + i] = PieceIndex(p.resident, t.slot, t.head, place, tokens);
    }
  }
  if (threadIdx.x != 0) return;
  p.move_counts[list] = moves;
  if (!due || p.counters == nullptr) return;
  SparseCounters& counters = p.counters[t.slot];
  atomicAdd(reinterpret_cast<unsigned long long*>(&counters.recalled),
            static_cast<unsigned long long>(int64_t{moves} * p.unit_tokens));
  if (t.head == 0) counters.recalls += 1;
}

}  // namespace sluice::kernels::cuda
