// The path of TopK that most lists can take, with a cluster of blocks to a list. Each thread has
// the best score of a few groups of its own. At least as many groups as units are wanted have a
// score of at least the wanted-th best of all groups' bests, so nothing below that is chosen. The
// scores that are left are fewer than twice the wanted number unless the best scores lie close
// together. Every block then has them all in its own shared memory, and ranks them by itself.
#pragma once

#include "kernels/cuda/select/select.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kNarrowThreads = 512;
inline constexpr int kMaxNarrowed = 4096;  // keys that are left, or bests of groups
inline constexpr int kMaxGroups = 8;       // groups of a thread
inline constexpr int kMaxNarrowWanted = kMaxNarrowed / 2;
inline constexpr int kNarrowWords = 2;  // words, of 32 keys of a block each, to a thread
inline constexpr uint16_t kNotChosen = 0xFFFF;

// Shared memory of a block, at the same address in every block of the cluster.
struct NarrowShared {
  SelectShared select;
  // read by other blocks: the best key of all, and how many are left here
  alignas(16) uint32_t told[4];
  alignas(16) uint32_t offered[kMaxNarrowed];
  uint32_t ranges[2][2];  // least and largest key
};

// Keys in this block's shared memory, above `low`.
struct GatheredKeys {
  const uint32_t* keys;
  uint32_t low;
  int count;

  __device__ __forceinline__ uint32_t At(int i) const {
    return keys[i] == kNeverSelected ? kNeverSelected : keys[i] - low;
  }
};

class Narrowing {
 public:
  // `kept` holds this block's `key_count` keys, which are destroyed, and has room for
  // kMaxNarrowed. Keys past `most` do not count. REQUIRES: ranges[0] and ranges[1] are {never,
  // 0}, bins are 0.
  __device__ Narrowing(NarrowShared& of_block, uint32_t* kept, int key_count, uint32_t most,
                       int of_wanted, int of_blocks, int of_rank)
      : shared(of_block),
        keys(kept),
        count(key_count),
        limit(min(most, kNeverSelected - 1)),
        wanted(static_cast<uint32_t>(of_wanted)),
        blocks(of_blocks),
        rank(of_rank) {}

  // Lowers the limit. `best` holds the bests of this thread's keys by their number in the thread,
  // modulo kMaxGroups.
  __device__ void Limit(uint32_t (&best)[kMaxGroups]) {
    int groups = 1;
    while (groups < kMaxGroups && blocks * kNarrowThreads * groups < 2 * static_cast<int>(wanted)) {
      groups *= 2;
    }
#pragma unroll
    for (int half = kMaxGroups / 2; half >= 1; half /= 2) {
      if (groups > half) continue;
#pragma unroll
      for (int i = 0; i < half; ++i) best[i] = min(best[i], best[i + half]);
    }
    uint32_t* const bests = &shared.select.bins[0][0] + kSelectBins;  // the second and third bins
#pragma unroll
    for (int i = 0; i < kMaxGroups; ++i) {
      if (i < groups) {
        bests[i * kNarrowThreads + threadIdx.x] = best[i] <= limit ? best[i] : kNeverSelected;
      }
    }
    MeetBlocks(blocks);
    const int of_block = groups * kNarrowThreads, all = blocks * of_block;
    uint32_t low = kNeverSelected, high = 0;
    for (int i = static_cast<int>(threadIdx.x) * 4; i < all; i += kNarrowThreads * 4) {
      const int block = i / of_block;
      const uint4 v = ReadBlock(bests + (i - block * of_block), block, blocks);
      *reinterpret_cast<uint4*>(shared.offered + i) = v;
      Widen(v.x, low, high), Widen(v.y, low, high), Widen(v.z, low, high), Widen(v.w, low, high);
    }
    const int bits = RangeBits(low, high, shared.ranges[0]);
    uint32_t lacking;
    const GatheredKeys of_groups = {shared.offered, low, all};
    const SelectCut cut =
        FindSelectCut<kNarrowThreads>(of_groups, bits, wanted, 1, 0, shared.select, &lacking, 1);
    if (lacking == 0) limit = min(limit, low + cut.below - (cut.equals == 0 ? 1 : 0));
  }

  // Returns true if every block has all keys that are left.
  __device__ bool Gather() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    constexpr int kWarps = kNarrowThreads / 32;
    __syncthreads();  // `offered` was read
    for (int word = warp; word < kNarrowWords * kNarrowThreads; word += kWarps) {
      const int i = word * 32 + lane;
      const unsigned left =
          __ballot_sync(0xFFFFFFFFu, i < count && keys[min(i, count - 1)] <= limit);
      if (lane == 0) shared.offered[word] = left;
    }
    __syncthreads();
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kNarrowWords; ++i) {
      words[i] = shared.offered[threadIdx.x * kNarrowWords + i];
      mine += static_cast<uint32_t>(__popc(words[i]));
    }
    const BlockSum sum = ScanBlock(mine, shared.select.totals);
    before = static_cast<int>(sum.before);
    own = static_cast<int>(sum.total);
    if (own <= kMaxNarrowed) {
      ForEach([&](int number, int i) { shared.offered[number] = keys[i]; });
    }
    if (threadIdx.x == 0) shared.told[1] = sum.total;
    MeetBlocks(blocks);
    const int of_lane =
        lane < blocks ? static_cast<int>(ReadBlock(shared.told, lane, blocks).y) : 0;
    all = __reduce_add_sync(0xFFFFFFFFu, of_lane);
    own_begin = __reduce_add_sync(0xFFFFFFFFu, lane < rank ? of_lane : 0);
    if (all > kMaxNarrowed) return false;
    // Each block is read by the same number of warps; the number of blocks is a power of two.
    const int block = warp % blocks, part = warp / blocks, parts = kWarps / blocks;
    const int begin = __reduce_add_sync(0xFFFFFFFFu, lane < block ? of_lane : 0);
    const int end = begin + __shfl_sync(0xFFFFFFFFu, of_lane, block);
    uint32_t low = kNeverSelected, high = 0;
    for (int i = (part * 32 + lane) * 4; begin + i < end; i += parts * 128) {
      const uint4 v = ReadBlock(shared.offered + i, block, blocks);
      const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (begin + i + j >= end) continue;
        keys[begin + i + j] = four[j];
        Widen(four[j], low, high);
      }
    }
    range_bits = RangeBits(low, high, shared.ranges[1]);
    range_low = low;
    return true;
  }

  // Calls visit(number, i) for this block's keys that are among the `most` best of those that no
  // call has chosen yet, in any order. Numbers follow the order of the keys. Returns how many all
  // blocks choose. REQUIRES: Gather() was true, most >= 1.
  template <typename Visit>
  __device__ int Choose(uint32_t most, Visit visit) {
    auto* const numbers = reinterpret_cast<uint16_t*>(shared.select.bins[1]);
    for (int i = static_cast<int>(threadIdx.x); i < own; i += kNarrowThreads) {
      numbers[i] = kNotChosen;
    }
    uint32_t lacking;
    const GatheredKeys left = {keys, range_low, all};
    const SelectCut cut =
        FindSelectCut<kNarrowThreads>(left, range_bits, most, 1, 0, shared.select, &lacking);
    const uint32_t chosen =
        VisitSelected<kNarrowThreads>(left, cut, shared.select, [&](int i, uint32_t number) {
          keys[i] = kNeverSelected;
          if (i >= own_begin && i - own_begin < own) {
            numbers[i - own_begin] = static_cast<uint16_t>(number);
          }
        });
    __syncthreads();
    ForEach([&](int number, int i) {
      if (numbers[number] != kNotChosen) visit(static_cast<int>(numbers[number]), i);
    });
    __syncthreads();  // another call writes the numbers
    return static_cast<int>(chosen);
  }

 private:
  __device__ static void Widen(uint32_t key, uint32_t& low, uint32_t& high) {
    if (key == kNeverSelected) return;
    low = min(low, key);
    high = max(high, key);
  }

  // Finds the block's range, in `low`, and returns the bits that its keys above `low` take. All
  // threads synchronise.
  __device__ static int RangeBits(uint32_t& low, uint32_t high, uint32_t (&range)[2]) {
    low = __reduce_min_sync(0xFFFFFFFFu, low);
    high = __reduce_max_sync(0xFFFFFFFFu, high);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&range[0], low);
      atomicMax(&range[1], high);
    }
    __syncthreads();
    low = range[0];
    return low > range[1] ? 0 : 32 - __clz(static_cast<int>(range[1] - low));
  }

  // Calls visit(number among the block's, key) for the keys of this thread's words that are left.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(Visit visit) const {
    int number = before;
#pragma unroll
    for (int i = 0; i < kNarrowWords; ++i) {
      for (uint32_t word = words[i]; word != 0; word &= word - 1) {
        const int bit = __ffs(static_cast<int>(word)) - 1;
        visit(number++, (static_cast<int>(threadIdx.x) * kNarrowWords + i) * 32 + bit);
      }
    }
  }

  NarrowShared& shared;
  uint32_t* const keys;
  const int count;
  uint32_t limit;
  const uint32_t wanted;
  const int blocks, rank;
  uint32_t words[kNarrowWords];
  int before, own, own_begin, all;  // counts of keys that are left
  int range_bits;
  uint32_t range_low;
};

}  // namespace sluice::kernels::cuda
