// The parts of Bring: a cluster of blocks takes a list. Each block has a run of the row's tokens,
// the *tokens' side*, and a run of the places behind the ring, the *places' side*. Words of 32 bits
// say which tokens of the run are selected or missing, and which places are kept or given.
#pragma once

#include "kernels/bring_params.h"
#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/residency/residency.cuh"
#include "kernels/cuda/residency/residency_recall.cuh"
#include "kernels/cuda/select/select.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kBringThreads = 512;
inline constexpr int kBringAtOnce = 8;  // loads of a thread under way
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The runs of a list's tokens and places that its blocks have, in multiples of 32.
struct BringRuns {
  int tokens, places;

  // `all_tokens` and `all_places` are the most of any list.
  BringRuns(int64_t all_tokens, int64_t all_places, int blocks)
      : tokens(static_cast<int>((all_tokens + 32 * blocks - 1) / (32 * blocks) * 32)),
        places(static_cast<int>((all_places + 32 * blocks - 1) / (32 * blocks) * 32)) {}
};

// Bins of equal width into which scores are counted, one to a thread. The bin of the cut holds some
// 200 of 32K scores that are spread like a normal distribution.
inline constexpr int kScoreBins = kBringThreads;
inline constexpr int kMostNear = 1024;  // tokens in the bin of the cut that are ranked

// Shared memory of a block, at the same address in every block of the cluster. Behind it lie the
// arrays of BringArrays.
struct BringShared {
  SelectShared select;
  // Read by other blocks. Of this block's tokens and places: the best key of all, the least and the
  // largest of those that are not forced, and the oldest and the newest stamp; then how many tokens
  // are selected, how many of those miss, and how many places have a token. Then the numbers of
  // tokens in each of the bins of scores, how many tokens are near the cut, and those tokens.
  alignas(16) uint32_t told[8];
  alignas(16) uint32_t counted[4];
  alignas(16) uint32_t score_bins[kScoreBins];
  alignas(16) uint32_t near_counts[4];
  uint64_t near[kMostNear];             // their ranks, in any order
  uint64_t all_near[kMostNear];         // those of all blocks
  uint32_t bin, bin_before, bin_count;  // bin of the cut, sum of better bins, and its own sum
  uint64_t cut;
  int job;  // the list that was found
  int tie;
};
inline constexpr int kBringArraysAt = (sizeof(BringShared) + 15) / 16 * 16;

struct BringArrays {
  int2* entries;  // [places] of the table, and for a place that is given the number of its token
  uint32_t *selected, *missing;                // [tokens / 32]
  uint32_t *before_selected, *before_missing;  // [tokens / 32] set bits in the words before
  uint32_t *given, *held;                      // [places / 32] whether a place is given, and listed
  uint32_t* before_held;                       // [places / 32]
  uint32_t* place_keys;                        // [places] raw keys of their tokens, 0: forced
  uint32_t* keys;                              // [room]

  static constexpr int Bytes(int tokens, int places, int room) {
    return kBringArraysAt + tokens / 32 * 16 + places / 32 * 12 + places * 12 + room * 4;
  }
  __device__ BringArrays(unsigned char* memory, int of_tokens, int of_places) {
    entries = reinterpret_cast<int2*>(memory + kBringArraysAt);
    selected = reinterpret_cast<uint32_t*>(entries + of_places);
    missing = selected + of_tokens / 32;
    before_selected = missing + of_tokens / 32;
    before_missing = before_selected + of_tokens / 32;
    given = before_missing + of_tokens / 32;
    held = given + of_places / 32;
    before_held = held + of_places / 32;
    place_keys = before_held + of_places / 32;
    keys = place_keys + of_places;
  }
};

inline constexpr uint32_t kWorstKey = 0xFF800000u;  // RankKey of -inf
// Returns the score of a RankKey. No score has key 0.
__device__ __forceinline__ float ScoreOf(uint32_t key) { return FloatOf(~key); }

// Where a selection ends: tokens whose rank (RankOf) is below it are selected. No two tokens of a
// list have the same rank, and lower tokens come first among equal scores.
using Cut = uint64_t;
__device__ __forceinline__ uint64_t RankOf(uint32_t key, int token) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(token);
}

// The scores that may be selected, as keys from 1: `low` becomes 1, and those past `limit` are
// never selected. Key 0 is that of tokens that are forced in.
struct KeyRange {
  uint32_t low, limit;

  __device__ __forceinline__ uint32_t KeyOf(uint32_t raw) const {
    return raw == 0 ? 0 : raw <= limit ? raw - low + 1 : kNeverSelected;
  }
};

// The keys of the tokens of a block's run: 0 for those that are forced in, else by score, from 1.
struct TokenKeys {
  const float* scores;
  const uint32_t* kept;
  int kept_count, count;
  int forced_below, forced_from;  // tokens of the run below the first and from the second
  KeyRange range;

  __device__ __forceinline__ bool Forced(int i) const {
    return i < forced_below || i >= forced_from;
  }
  __device__ __forceinline__ uint32_t Raw(int i) const {
    return i < kept_count ? kept[i] : RankKey(__ldcg(scores + i));
  }
  __device__ __forceinline__ uint32_t At(int i) const {
    return Forced(i) ? 0 : range.KeyOf(Raw(i));
  }
};

// The keys of the places of a block's run: 0 for free ones, else by stamp, from 1. A place whose
// token is selected is not given.
struct PlaceKeys {
  const int2* entries;
  const uint32_t* raw_keys;
  KeyRange range;  // of tokens
  Cut cut;
  int count;
  int position, ring, oldest, newest;

  __device__ __forceinline__ bool InRing(int unit) const { return position - unit < ring; }
  // Returns whether the place keeps a token because that is selected. A token in the ring is not
  // looked for elsewhere.
  __device__ __forceinline__ bool Keeps(int i) const {
    const int unit = entries[i].x;
    return unit >= 0 && !InRing(unit) && RankOf(range.KeyOf(raw_keys[i]), unit) < cut;
  }
  __device__ __forceinline__ uint32_t At(int i) const {
    const int2 entry = entries[i];
    if (entry.x == kNoPlace) return kNeverSelected;
    if (entry.x < 0) return 0;
    if (entry.y == position || Keeps(i)) return kNeverSelected;
    return static_cast<uint32_t>(entry.y) - static_cast<uint32_t>(oldest) + 1;
  }
};

__device__ __forceinline__ uint64_t LongWordOf(const uint64_t* at, int block, int blocks) {
  if (blocks == 1) return *at;
  uint64_t v;
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.u64 %0, [remote];\n"
      "}\n"
      : "=l"(v)
      : "r"(SharedAddress(at)), "r"(block));
  return v;
}
__device__ __forceinline__ void SetLongWordOf(uint64_t* at, int block, uint64_t value, int blocks) {
  if (blocks == 1) {
    *at = value;
    return;
  }
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u64 [remote], %2;\n"
      "}\n" ::"r"(SharedAddress(at)),
      "r"(block), "l"(value)
      : "memory");
}

// Writes to before[w] how many bits are set in words [0, w), and returns how many in all. All
// threads call it; before it a barrier is needed for the words, and behind it `before` is ready.
__device__ __forceinline__ int CountBits(const uint32_t* words, int count, uint32_t* before,
                                         uint32_t* totals) {
  uint32_t sum = 0;
  for (int first = 0; first < count; first += kBringThreads) {
    const int w = first + static_cast<int>(threadIdx.x);
    const uint32_t mine = w < count ? static_cast<uint32_t>(__popc(words[w])) : 0;
    const BlockSum of_words = ScanBlock(mine, totals);
    if (w < count) before[w] = sum + of_words.before;
    sum += of_words.total;
  }
  __syncthreads();
  return static_cast<int>(sum);
}

__device__ __forceinline__ bool HasBit(const uint32_t* words, int i) {
  return (words[i / 32] >> i % 32 & 1u) != 0;
}
// Returns how many bits are set before bit i.
__device__ __forceinline__ int BitsBefore(const uint32_t* words, const uint32_t* before, int i) {
  return static_cast<int>(before[i / 32]) + __popc(words[i / 32] & ((1u << i % 32) - 1));
}

}  // namespace sluice::kernels::cuda
