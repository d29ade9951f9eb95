// Retain, by one block to a list: it finds the one place that is to be given and copies the unit
// there, within HBM.
#pragma once

#include "kernels/cuda/residency/residency.cuh"

namespace sluice::kernels::cuda {

// The order in which places are given, as a number: free ones, then by stamp, lower places first.
__device__ __forceinline__ uint64_t PlaceOrder(int unit, int stamp, int place) {
  const uint64_t by_stamp = uint64_t{static_cast<uint32_t>(stamp) ^ 0x80000000u} + 1;
  return (unit < 0 ? 0 : by_stamp) << 31 | static_cast<uint32_t>(place);
}

// Gives the unit a place and returns it; -1: there is none to be given. The whole block calls it.
// `best` has an entry for each warp.
__device__ __forceinline__ int TakePlace(const ListTables& t, int unit, bool only_free,
                                         uint64_t* best) {
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  constexpr uint64_t kNone = UINT64_MAX;
  uint64_t mine = kNone;
#pragma unroll 4
  for (int place = t.ring + thread; place < t.count; place += threads) {
    const int32_t* const row = t.places.At(place);
    const int has = row[0], stamp = row[1];
    if (has == kNoPlace || (has >= 0 && (only_free || stamp == t.position))) continue;
    mine = min(mine, PlaceOrder(has, stamp, place));
  }
  for (int step = 16; step > 0; step /= 2) {
    mine = min(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, step));
  }
  if (thread % 32 == 0) best[thread / 32] = mine;
  __syncthreads();
  mine = kNone;
  for (int warp = 0; warp < threads / 32; ++warp) mine = min(mine, best[warp]);
  if (mine == kNone) return -1;
  const int place = static_cast<int>(mine & 0x7FFFFFFFu);

  // Every thread has read the tables when it comes here.
  if (thread == 0) {
    int32_t* const row = t.places.At(place);
    if (row[0] >= 0) *t.place_of.At(row[0]) = -1;
    row[0] = unit;
    row[1] = t.position;
    *t.place_of.At(unit) = place;
  }
  return place;
}

// `row_words` is the number of 16-byte words of a token's K, and of its V. `best` has an entry for
// each warp.
__device__ __forceinline__ void RetainList(const RetainParams& p, int list, int row_words,
                                           uint64_t* best) {
  const PagedCache& c = p.resident;
  const ListTables t(p.residency, p.slots, p.positions, list, c.kv_heads, p.unit_tokens);
  WaitForPriorKernels();
  const int next = t.position + 1, unit = next / p.unit_tokens - t.ring;
  if (t.slot < 0 || next % p.unit_tokens != 0 || unit < 0) return;
  if (!t.persistent && *t.place_of.At(unit) >= 0) return;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);

  const int place = t.persistent ? t.ring + unit : TakePlace(t, unit, p.only_free, best);
  if (place < 0) return;

  const bool tokens = p.unit_tokens == 1;
  const auto key = [&](int at) {
    const int block = tokens ? at / c.block_tokens : at;
    const int64_t token = tokens ? at - block * c.block_tokens : 0;
    return reinterpret_cast<uint4*>(static_cast<char*>(c.base) +
                                    HeadBlockOffset(c, t.slot, block, t.head)) +
           token * row_words;
  };
  const uint4* const from = key(unit % t.ring);
  uint4* const to = key(place);
  const int run = p.unit_tokens * row_words, values = c.block_tokens * row_words;
  // A kernel of this step wrote some of these words, so the loads are plain ones. A thread's loads
  // are under way together.
  constexpr int kStrip = 4;
  for (int first = thread; first < 2 * run; first += kStrip * threads) {
    uint4 word[kStrip];
    int at[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const int index = first + i * threads;
      at[i] = index >= 2 * run ? -1 : index < run ? index : values + index - run;
      if (at[i] >= 0) word[i] = from[at[i]];
    }
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      if (at[i] >= 0) to[at[i]] = word[i];
    }
  }
}

}  // namespace sluice::kernels::cuda
