// Selection of the least of many keys, lower numbers first among equals, by a block or a cluster
// of blocks each of which has a run of the keys. A histogram of the keys' highest digit finds the
// bin that has the last key to be taken, a histogram of the next digit splits that bin, and so
// on. Then a walk in order numbers the taken keys.
#pragma once

#include "kernels/cuda/common/block_scan.cuh"
#include "kernels/cuda/common/tensor_copy.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kSelectDigitBits = 11;
inline constexpr int kSelectBins = 1 << kSelectDigitBits;
inline constexpr uint32_t kNeverSelected = 0xFFFFFFFFu;  // a key

// Shared memory of a block, at the same address in every block of a cluster. The bins must be
// zero before, and hold nothing of use after.
struct SelectShared {
  uint32_t bins[3][kSelectBins];
  uint32_t totals[32];
  uint32_t counts[32][2];
  uint32_t bin, before, count, earlier, earlier_in_bin;  // the bin that was found
};

// The selection: keys below `below`, and the first `equals` that are `below`; and how many keys
// of either sort the blocks before this one have.
struct SelectCut {
  uint32_t below;
  uint32_t equals;
  uint32_t earlier_below, earlier_equal;
};

// All threads of the cluster synchronise.
__device__ __forceinline__ void MeetBlocks(int blocks) {
  if (blocks == 1) {
    __syncthreads();
  } else {
    SyncCluster();
  }
}

// Reads four words of a block's shared memory. `at` is their address in this block.
__device__ __forceinline__ uint4 ReadBlock(const uint32_t* at, int block, int blocks) {
  if (blocks == 1) return *reinterpret_cast<const uint4*>(at);
  const float4 v = LoadFromBlock(SharedAddress(at), block);
  return {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
}

// Sums of this thread's neighbouring bins: over all blocks, and over those before `rank`.
template <int kEach>
struct BinSums {
  uint32_t all[kEach] = {}, earlier[kEach] = {};

  // A block alone clears its bins, which serve the next digit too.
  __device__ __forceinline__ BinSums(uint32_t* bins, int blocks, int rank) {
    static_assert(kEach == 2 || kEach == 4);
    uint32_t* const mine = bins + threadIdx.x * kEach;
    if (blocks == 1) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        all[i] = mine[i];
        mine[i] = 0;
      }
      return;
    }
    // Four bins are read at a time. With two bins to a thread, two threads read the same ones.
    const uint32_t from = SharedAddress(bins + threadIdx.x * kEach / 4 * 4);
    const int skip = static_cast<int>(threadIdx.x) * kEach % 4;
#pragma unroll 8
    for (int block = 0; block < blocks; ++block) {
      const float4 v = LoadFromBlock(from, block);
      const uint32_t of_block[4] = {__float_as_uint(v.x), __float_as_uint(v.y),
                                    __float_as_uint(v.z), __float_as_uint(v.w)};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint32_t count = kEach == 4 || skip == 0 ? of_block[i] : of_block[i + 4 - kEach];
        all[i] += count;
        earlier[i] += block < rank ? count : 0;
      }
    }
  }
};

// Finds the cut that leaves `wanted` >= 1 of all blocks' keys, or all if there are fewer. Only
// keys below 2^bits count. `keys` has count, and At(i) for i < count. `missing` is the part of
// `wanted` still to be taken. With fewer than 3 `digits` the cut may leave more. A block alone
// uses the first bins only, and leaves zeros there.
template <int kThreads, typename Keys>
__device__ SelectCut FindSelectCut(const Keys& keys, int bits, uint32_t wanted, int blocks,
                                   int rank, SelectShared& shared, uint32_t* missing,
                                   int digits = 3) {
  constexpr int kEach = kSelectBins / kThreads;
  *missing = 0;
  uint32_t prefix = 0, earlier = 0;
  for (int digit = 0;; ++digit) {
    const int width = min(bits, kSelectDigitBits), shift = bits - width;
    uint32_t* const bins = shared.bins[blocks == 1 ? 0 : digit];
    for (int i = static_cast<int>(threadIdx.x); i < keys.count; i += kThreads) {
      const uint32_t key = keys.At(i);
      if (key == kNeverSelected || (bits < 32 && key >> bits != prefix)) continue;
      atomicAdd(bins + (key >> shift & (kSelectBins - 1)), 1u);
    }
    MeetBlocks(blocks);
    const BinSums<kEach> sums(bins, blocks, rank);
    uint32_t mine = 0, mine_earlier = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mine += sums.all[i];
      mine_earlier += sums.earlier[i];
    }
    const BlockSum scan = ScanBlock(mine, shared.totals);
    uint32_t before_earlier = 0, total_earlier = 0;
    if (blocks > 1) {
      const BlockSum of_earlier = ScanBlock(mine_earlier, shared.totals);
      before_earlier = of_earlier.before;
      total_earlier = of_earlier.total;
    }
    if (digit == 0 && scan.total < wanted) {
      *missing = wanted - scan.total;
      return {bits < 32 ? 1u << bits : kNeverSelected, 0, total_earlier, 0};
    }
    uint32_t before = scan.before;
    if (before < wanted && wanted <= before + mine) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (before < wanted && wanted <= before + sums.all[i]) {
          shared.bin = threadIdx.x * kEach + static_cast<uint32_t>(i);
          shared.before = before;
          shared.count = sums.all[i];
          shared.earlier = before_earlier;
          shared.earlier_in_bin = sums.earlier[i];
        }
        before += sums.all[i];
        before_earlier += sums.earlier[i];
      }
    }
    __syncthreads();
    // The result is overwritten only after another synchronisation.
    prefix = prefix << width | shared.bin;
    wanted -= shared.before;
    earlier += shared.earlier;
    const uint32_t count = shared.count, earlier_in_bin = shared.earlier_in_bin;
    bits = shift;
    if (bits == 0 && count != wanted) return {prefix, wanted, earlier, earlier_in_bin};
    if (count == wanted || digit + 1 == digits) {
      return {(prefix + 1) << bits, 0, earlier + earlier_in_bin, 0};
    }
  }
}

// Calls visit(i, number) for every key of this block that is taken. Numbers count the taken keys
// of all blocks in order or, with `kLessFirst`, which only a block alone may ask for, first those
// below the cut. Returns how many are taken up to and including this block's.
template <int kThreads, bool kLessFirst = false, typename Keys, typename Visit>
__device__ uint32_t VisitSelected(const Keys& keys, const SelectCut& cut, SelectShared& shared,
                                  Visit visit) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // Each warp has a run of the keys.
  const int share = (keys.count + kThreads - 1) / kThreads * 32;
  const int first = min(warp * share, keys.count), last = min(first + share, keys.count);
  uint32_t below = 0, equal = 0;
  for (int i = first + lane; i < last; i += 32) {
    const uint32_t key = keys.At(i);
    below += key < cut.below ? 1 : 0;
    equal += key == cut.below ? 1 : 0;
  }
  below = __reduce_add_sync(kAll, below);
  equal = __reduce_add_sync(kAll, equal);
  if (lane == 0) {
    shared.counts[warp][0] = below;
    shared.counts[warp][1] = equal;
  }
  __syncthreads();
  const uint32_t of_lane_below = lane < kThreads / 32 ? shared.counts[lane][0] : 0;
  const uint32_t of_lane_equal = lane < kThreads / 32 ? shared.counts[lane][1] : 0;
  const uint32_t all_below = cut.earlier_below + __reduce_add_sync(kAll, of_lane_below);
  const uint32_t all_equal = cut.earlier_equal + __reduce_add_sync(kAll, of_lane_equal);
  uint32_t belows = cut.earlier_below + __reduce_add_sync(kAll, lane < warp ? of_lane_below : 0);
  uint32_t equals = cut.earlier_equal + __reduce_add_sync(kAll, lane < warp ? of_lane_equal : 0);
  const unsigned before = (1u << lane) - 1;
  for (int at = first; at < last; at += 32) {
    const int i = at + lane;
    const uint32_t key = i < last ? keys.At(i) : kNeverSelected;
    const unsigned is_below = __ballot_sync(kAll, key < cut.below);
    const unsigned is_equal = __ballot_sync(kAll, key == cut.below && i < last);
    if ((is_below | is_equal) == 0) continue;
    const uint32_t equals_before = equals + static_cast<uint32_t>(__popc(is_equal & before));
    const bool taken =
        key < cut.below || (i < last && key == cut.below && equals_before < cut.equals);
    if (taken) {
      const uint32_t belows_before = belows + static_cast<uint32_t>(__popc(is_below & before));
      if (kLessFirst) {
        visit(i, key < cut.below ? belows_before : all_below + equals_before);
      } else {
        visit(i, belows_before + min(equals_before, cut.equals));
      }
    }
    belows += static_cast<uint32_t>(__popc(is_below));
    equals += static_cast<uint32_t>(__popc(is_equal));
  }
  return all_below + min(all_equal, cut.equals);
}

}  // namespace sluice::kernels::cuda
