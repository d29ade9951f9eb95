// The places that a block gives to a sequence's units: free ones, which are the last of those
// that the sequence has, or those used longest ago.
#pragma once

#include "kernels/cuda/residency/residency.cuh"
#include "kernels/cuda/select/select.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kUpdateThreads = 512;
inline constexpr int kUpdateWarps = kUpdateThreads / 32;
inline constexpr int kKeptPlaces = 16384;  // keys that stay in shared memory
inline constexpr int kPlacesAtOnce = 16;   // loads of a thread under way
inline constexpr int kRankedPlaces = 256;  // places that are ranked rather than sorted
inline constexpr int kPlaceBits = 20;      // bits of the number of a place that is ranked

// Returns 0 for a free place, and otherwise a key in the order of its stamp. Places that the
// sequence does not have get kNeverSelected.
__device__ __forceinline__ uint32_t PlaceKey(int2 place) {
  if (place.x == kNoPlace) return kNeverSelected;
  return place.x < 0 ? 0 : static_cast<uint32_t>(max(place.y, -1)) + 2;
}

// Finds where a table's taken places end, and where those that the sequence has end: taken places
// come first, then free ones, then those that the sequence does not have. All threads make two
// rounds of loads, however many places there are. A load of one of 512 places finds the part in
// which an end lies, and a load of one place of that part finds the end. The block synchronises
// between the rounds and after the second.
class PlaceEnds {
 public:
  struct Shared {
    uint32_t rounds[2][32];  // sums of warps: taken, and in the upper half had
  };
  __device__ PlaceEnds(const HeadTable& places, int count, Shared& shared)
      : places_(places),
        shared_(shared),
        count_(count),
        part_((count + kUpdateThreads - 1) / kUpdateThreads) {}

  // Result of a round's loads. The Ask methods start them without waiting for them.
  struct Asked {
    int taken, had;  // units, or kNoPlace
  };
  __device__ Asked AskFirst() const {
    const int part = static_cast<int>(threadIdx.x);
    const int last = min((part + 1) * part_, count_) - 1;
    const int unit = part * part_ < count_ ? places_.At(last)[0] : kNoPlace;
    return {unit, unit};
  }
  __device__ void TakeFirst(const Asked& asked) { Sum(0, Found(asked)); }
  __device__ Asked AskSecond() {
    const uint32_t parts = Total(0);
    taken_ = min(static_cast<int>(parts & 0xFFFF) * part_, count_);
    had_ = min(static_cast<int>(parts >> 16) * part_, count_);
    return AskPart(static_cast<int>(threadIdx.x));
  }
  __device__ void TakeSecond(const Asked& asked) {
    uint32_t found = Found(asked);
    for (int i = static_cast<int>(threadIdx.x) + kUpdateThreads; i < part_; i += kUpdateThreads) {
      found += Found(AskPart(i));
    }
    Sum(1, found);
  }
  // All threads call it.
  __device__ void Finish() {
    const uint32_t found = Total(1);
    taken_ += static_cast<int>(found & 0xFFFF);
    had_ += static_cast<int>(found >> 16);
  }
  __device__ int taken() const { return taken_; }
  __device__ int had() const { return had_; }

 private:
  __device__ Asked AskPart(int i) const {
    return {i < part_ && taken_ + i < count_ ? places_.At(taken_ + i)[0] : kNoPlace,
            i < part_ && had_ + i < count_ ? places_.At(had_ + i)[0] : kNoPlace};
  }
  __device__ static uint32_t Found(const Asked& asked) {
    return (asked.taken >= 0 ? 1u : 0u) | (asked.had != kNoPlace ? 0x10000u : 0u);
  }
  __device__ void Sum(int round, uint32_t found) {
    found = __reduce_add_sync(0xFFFFFFFFu, found);
    if (threadIdx.x % 32 == 0) shared_.rounds[round][threadIdx.x / 32] = found;
  }
  __device__ uint32_t Total(int round) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return __reduce_add_sync(0xFFFFFFFFu, lane < kUpdateWarps ? shared_.rounds[round][lane] : 0);
  }

  const HeadTable& places_;
  Shared& shared_;
  const int count_;
  const int part_;  // places of a part
  int taken_ = 0, had_ = 0;
};

// Keys of places that may be given, less `low`, and at most `high`; kNeverSelected for places
// that may not.
struct PlaceKeys {
  const HeadTable& places;
  const uint32_t* kept;  // keys of the first places, kNeverSelected if held
  const uint32_t* held;  // a bit for each place
  uint32_t low, high;
  int kept_count;
  int count;

  __device__ __forceinline__ uint32_t Whole(int place) const {
    if (place < kept_count) return kept[place];
    if (held[place / 32] >> (place % 32) & 1) return kNeverSelected;
    return PlaceKey(*reinterpret_cast<const int2*>(places.At(place)));
  }
  __device__ __forceinline__ uint32_t At(int place) const {
    const uint32_t key = Whole(place);
    return key == kNeverSelected ? key : min(key - low, high);
  }
};

// Chooses the places of the least (key, place) among `count` places, except held ones.
class PlaceChoice {
 public:
  // `keys` has room for the first `kept_count` places. REQUIRES: the bins of `select` are zero,
  // and `found` is 0.
  __device__ PlaceChoice(const HeadTable& places, int count, const uint32_t* held, uint32_t* keys,
                         int kept_count, SelectShared& select, uint32_t* found)
      : places_(places),
        held_(held),
        keys_(keys),
        select_(select),
        found_(found),
        count_(count),
        kept_count_(min(kept_count, count)) {}

  // Writes the places to the lower halves of `given`, in order. All threads call it and
  // synchronise at the end.
  __device__ void Choose(uint32_t wanted, uint64_t* given) {
    const Least least = ReadKeys();
    if (least.key == kNeverSelected) __trap();
    if (wanted == 1) {  // the usual case: a place for the next position
      if (threadIdx.x == 0) given[0] = least.place;
      __syncthreads();
      return;
    }
    // A digit holds the oldest stamps, one by one, and all others in its last bin. Further digits
    // are used only if the choice reaches so deep.
    PlaceKeys keys = {places_, keys_, held_, least.key, kSelectBins - 1, kept_count_, count_};
    uint32_t lacking;
    SelectCut cut =
        FindSelectCut<kUpdateThreads>(keys, kSelectDigitBits, wanted, 1, 0, select_, &lacking);
    if (lacking > 0) __trap();
    if (cut.below + (cut.equals > 0 ? 1 : 0) > keys.high && least.highest - least.key > keys.high) {
      keys.high = kNeverSelected - 1;
      const int bits = 32 - __clz(static_cast<int>(least.highest - least.key));
      __syncthreads();
      cut = FindSelectCut<kUpdateThreads>(keys, bits, wanted, 1, 0, select_, &lacking);
    }
    // Includes all others of the cut's own key.
    const uint32_t candidates = wanted - cut.equals + (cut.equals > 0 ? select_.count : 0);
    if (candidates <= kRankedPlaces && keys.high < kSelectBins && count_ <= 1 << kPlaceBits) {
      Rank(keys, cut, wanted, given);
      return;
    }
    VisitSelected<kUpdateThreads, true>(keys, cut, select_, [&](int place, uint32_t number) {
      given[number] = uint64_t{keys.At(place)} << 32 | static_cast<uint32_t>(place);
    });
    __syncthreads();
    // Places of the cut's own key come last, in order of places.
    Sort(given, static_cast<int>(wanted - cut.equals));
  }

 private:
  struct Least {
    uint32_t key, place, highest;
  };
  __device__ static int Thread() { return static_cast<int>(threadIdx.x); }

  // Keeps the keys, and finds the least and the highest.
  __device__ Least ReadKeys() {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    uint32_t least = kNeverSelected, place = kNeverSelected, highest = 0;
    for (int from = 0; from < count_; from += kPlacesAtOnce * kUpdateThreads) {
      int2 loaded[kPlacesAtOnce];
#pragma unroll
      for (int i = 0; i < kPlacesAtOnce; ++i) {
        const int at = from + i * kUpdateThreads + Thread();
        loaded[i] = {kNoPlace, 0};
        if (at < count_) loaded[i] = *reinterpret_cast<const int2*>(places_.At(at));
      }
#pragma unroll
      for (int i = 0; i < kPlacesAtOnce; ++i) {
        const int at = from + i * kUpdateThreads + Thread();
        if (at >= count_) continue;
        uint32_t key = PlaceKey(loaded[i]);
        if (held_[at / 32] >> (at % 32) & 1) key = kNeverSelected;
        if (at < kept_count_) keys_[at] = key;
        if (key == kNeverSelected) continue;
        highest = max(highest, key);
        if (key >= least) continue;
        least = key;
        place = static_cast<uint32_t>(at);
      }
    }
    const uint32_t of_warp = __reduce_min_sync(kAll, least);
    place = __reduce_min_sync(kAll, least == of_warp ? place : kNeverSelected);
    highest = __reduce_max_sync(kAll, highest);
    if (threadIdx.x % 32 == 0) {
      select_.counts[threadIdx.x / 32][0] = of_warp;
      select_.counts[threadIdx.x / 32][1] = place;
      select_.totals[threadIdx.x / 32] = highest;
    }
    __syncthreads();
    const int warp = Thread() % kUpdateWarps;
    least = select_.counts[warp][0];
    place = select_.counts[warp][1];
    highest = __reduce_max_sync(kAll, select_.totals[warp]);
    const uint32_t of_all = __reduce_min_sync(kAll, least);
    place = __reduce_min_sync(kAll, least == of_all ? place : kNeverSelected);
    return {of_all, place, highest};
  }

  // Few candidates are gathered in any order, and then numbered by counting the candidates that
  // come earlier.
  __device__ void Rank(const PlaceKeys& keys, const SelectCut& cut, uint32_t wanted,
                       uint64_t* given) {
    auto* const found = reinterpret_cast<uint32_t*>(given);
    const uint32_t end = cut.below + (cut.equals > 0 ? 1 : 0);
    for (int place = Thread(); place < count_; place += kUpdateThreads) {
      const uint32_t key = keys.At(place);
      if (key >= end) continue;
      found[atomicAdd(found_, 1u)] = key << kPlaceBits | static_cast<uint32_t>(place);
    }
    __syncthreads();
    const int number = static_cast<int>(*found_);
    const uint32_t mine = Thread() < number ? found[Thread()] : 0;
    int rank = 0;
    if (Thread() < number) {
#pragma unroll 8
      for (int i = 0; i < number; ++i) rank += found[i] < mine ? 1 : 0;
    }
    __syncthreads();
    if (Thread() < number && rank < static_cast<int>(wanted)) {
      given[rank] = mine & ((1u << kPlaceBits) - 1);
    }
    __syncthreads();
  }

  __device__ static void Sort(uint64_t* given, int number) {
    bool late = false;
    for (int i = Thread(); i + 1 < number; i += kUpdateThreads) late |= given[i] > given[i + 1];
    if (__syncthreads_or(late ? 1 : 0) != 0) SortByNetwork(given, number);
  }

  // Sorts by a bitonic network in which every comparison leaves the lesser key at the lower
  // index, so that there may be any number of keys. A warp's 32 pairs are 64 neighbours as long
  // as their distance is at most 32: until then only the warp synchronises.
  __device__ static void SortByNetwork(uint64_t* given, int number) {
    for (int size = 2; size / 2 < number; size *= 2) {
      for (int step = size / 2; step > 0; step /= 2) {
        // The first step of a size compares with the mirrored half.
        const int flip = step == size / 2 ? size - 1 : step;
        for (int pair = Thread(); pair < number; pair += kUpdateThreads) {
          const int low = 2 * pair - (pair & (step - 1)), high = low ^ flip;
          if (high >= number) continue;
          const uint64_t a = given[low], b = given[high];
          if (a > b) {
            given[low] = b;
            given[high] = a;
          }
        }
        const int next = step > 1 ? step / 2 : size;
        if (max(step, next) > 32) {
          __syncthreads();
        } else {
          __syncwarp();
        }
      }
    }
    __syncthreads();
  }

  const HeadTable& places_;
  const uint32_t* const held_;
  uint32_t* const keys_;
  SelectShared& select_;
  uint32_t* const found_;
  const int count_, kept_count_;
};

}  // namespace sluice::kernels::cuda
