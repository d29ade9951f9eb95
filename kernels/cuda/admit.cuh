// Token residency of whole sequences: Admit, by one block to a sequence.
#pragma once

#include "kernels/cuda/residency.cuh"
#include "kernels/cuda/select.cuh"
#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

inline constexpr int kAdmitThreads = 1024;
inline constexpr int kAdmitStrip = 2;      // entries of a list that a thread takes at a time
inline constexpr int kKeptPlaces = 16384;  // keys that stay in shared memory
inline constexpr int kPlacesAtOnce = 8;    // loads of a thread under way
inline constexpr int kRankedPlaces = 256;  // places that are ranked rather than sorted

// How the shared memory of a block is laid out: SelectShared, then what `at` says, in bytes.
struct AdmitLayout {
  int32_t rows;   // of a sequence, at most
  int32_t lists;  // entries of a list
  int32_t kept;   // places whose keys are kept
  int32_t given;  // places that one call may give a sequence
  int32_t given_at, keys_at, held_at, missing_at, before_at, ahead_at, bytes;
};
inline AdmitLayout MakeAdmitLayout(const AdmitParams& p) {
  AdmitLayout l{};
  l.rows = p.rows < kMaxQueryPositions ? p.rows : kMaxQueryPositions;
  l.lists = p.selected.capacity;
  l.kept = p.residency.count < kKeptPlaces ? p.residency.count : kKeptPlaces;
  const int64_t most = int64_t{l.rows} * l.lists + p.ahead;
  l.given = static_cast<int32_t>(most < p.residency.count ? most : p.residency.count);
  int32_t end = static_cast<int32_t>(sizeof(SelectShared) + 15) / 16 * 16;
  const auto put = [&end](int64_t bytes) {
    const int32_t at = end;
    end = static_cast<int32_t>(end + (bytes + 15) / 16 * 16);
    return at;
  };
  l.given_at = put(int64_t{8} * l.given);
  l.keys_at = put(int64_t{4} * l.kept);
  l.held_at = put((int64_t{p.residency.count} + 31) / 32 * 4);
  l.missing_at = put(int64_t{4} * l.rows * l.lists);
  l.before_at = put(int64_t{2} * l.rows * (l.lists + 1));
  l.ahead_at = put(int64_t{4} * p.ahead);
  l.bytes = end;
  return l;
}

// Of a place: 0 if it is free, else in the order of its stamp. Places that the sequence has not:
// kNeverSelected.
__device__ __forceinline__ uint32_t PlaceKey(int2 place) {
  if (place.x == kNoPlace) return kNeverSelected;
  return place.x < 0 ? 0 : static_cast<uint32_t>(max(place.y, -1)) + 2;
}

// What may be given, above `low`: the places that no selected and no coming unit holds.
struct PlaceKeys {
  const HeadTable& places;
  const uint32_t* kept;
  const uint32_t* held;  // a bit for each place
  uint32_t low;
  int kept_count;
  int count;

  __device__ __forceinline__ uint32_t At(int place) const {
    if (held[place / 32] >> (place % 32) & 1) return kNeverSelected;
    uint32_t key;
    if (place < kept_count) {
      key = kept[place];
    } else {
      const int32_t* const row = places.At(place);
      key = PlaceKey({row[0], row[1]});
    }
    return key == kNeverSelected ? key : key - low;
  }
};

// The number of elements of a rising list that are below `unit`.
__device__ __forceinline__ int LowerBound(const int32_t* list, int count, int32_t unit) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    if (list[middle] < unit) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return low;
}

__device__ __forceinline__ int32_t EntryNumber(const PagedLatents& c, int slot, int entry) {
  const int block = entry / c.block_tokens;
  return c.block_table[slot * c.table_stride + block] * c.block_tokens +
         (entry - block * c.block_tokens);
}

// The work of a block: the sequence of rows [first, first + rows).
class Admission {
 public:
  __device__ Admission(const AdmitParams& params, const AdmitLayout& layout, int first_row,
                       int row_count, unsigned char* memory)
      : p(params),
        l(layout),
        select(*reinterpret_cast<SelectShared*>(memory)),
        given(reinterpret_cast<uint64_t*>(memory + layout.given_at)),
        keys(reinterpret_cast<uint32_t*>(memory + layout.keys_at)),
        held(reinterpret_cast<uint32_t*>(memory + layout.held_at)),
        missing(reinterpret_cast<int32_t*>(memory + layout.missing_at)),
        before(reinterpret_cast<uint16_t*>(memory + layout.before_at)),
        ahead(reinterpret_cast<int32_t*>(memory + layout.ahead_at)),
        first(first_row),
        rows(row_count),
        slot(p.slots[first_row]),
        last(p.positions[first_row + row_count - 1]),
        count(p.residency.count),
        place_of(p.residency.place_of, slot, 0),
        places(p.residency.places, slot, 0) {}

  __device__ void Run() {
    __shared__ Totals totals;
    Clear(totals);
    if (p.forget) Forget();
    // These loads are under way while the lists are split.
    int2 loaded[kPlacesAtOnce];
    FetchPlaces(0, loaded);
    __syncthreads();
    for (int r = 0; r < rows; ++r) SplitRow(r, totals);
    FindAhead(totals);
    PutKeys(loaded, totals);
    __syncthreads();
    const int moves = CountMissing(totals), wanted = moves + totals.ahead;
    if (moves > p.move_capacity) __trap();
    if (wanted > 0) {
      ChoosePlaces(static_cast<uint32_t>(wanted), totals);
      Give(moves, totals);
    }
    if (threadIdx.x == 0) Count(moves, totals);
  }

 private:
  struct Totals {
    uint32_t low, high;  // keys of places
    int misses[kMaxQueryPositions];
    int ahead;  // positions of them that lack a place
  };

  __device__ static int Thread() { return static_cast<int>(threadIdx.x); }
  __device__ int32_t* Missing(int r) const { return missing + r * l.lists; }
  // Entry i: how many units of the row's missing ones before i no earlier row misses.
  __device__ uint16_t* Before(int r) const { return before + r * (l.lists + 1); }

  __device__ void Clear(Totals& totals) {
    for (int i = Thread(); i < 3 * kSelectBins; i += kAdmitThreads) (&select.bins[0][0])[i] = 0;
    for (int i = Thread(); i < (count + 31) / 32; i += kAdmitThreads) held[i] = 0;
    if (threadIdx.x == 0) {
      totals.low = kNeverSelected;
      totals.high = 0;
    }
  }

  __device__ void Forget() {
    for (int place = Thread(); place < count; place += kAdmitThreads) {
      int32_t* const row = places.At(place);
      if (row[0] < 0) continue;
      *place_of.At(row[0]) = -1;
      row[0] = -1;
    }
    __syncthreads();
  }

  // Places from + Thread(), and every kAdmitThreads-th after it.
  __device__ void FetchPlaces(int from, int2 (&loaded)[kPlacesAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kPlacesAtOnce; ++i) {
      const int place = from + i * kAdmitThreads + Thread();
      loaded[i] = {kNoPlace, 0};
      if (place < count) loaded[i] = *reinterpret_cast<const int2*>(places.At(place));
    }
  }

  // The keys of all places, of which the first are loaded. Stamps of this call may be in them or
  // not: those places are held.
  __device__ void PutKeys(int2 (&loaded)[kPlacesAtOnce], Totals& totals) {
    uint32_t low = kNeverSelected, high = 0;
    for (int from = 0; from < count; from += kPlacesAtOnce * kAdmitThreads) {
      if (from > 0) FetchPlaces(from, loaded);
#pragma unroll
      for (int i = 0; i < kPlacesAtOnce; ++i) {
        const int place = from + i * kAdmitThreads + Thread();
        const uint32_t key = PlaceKey(loaded[i]);
        if (place < l.kept) keys[place] = key;
        if (key == kNeverSelected) continue;
        low = min(low, key);
        high = max(high, key);
      }
    }
    low = __reduce_min_sync(0xFFFFFFFFu, low);
    high = __reduce_max_sync(0xFFFFFFFFu, high);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&totals.low, low);
      atomicMax(&totals.high, high);
    }
  }

  __device__ void Hold(int place) { atomicOr(held + place / 32, 1u << place % 32); }

  // A row's list into places that it has, and units that have none.
  __device__ void SplitRow(int r, Totals& totals) {
    const int64_t list = int64_t{first + r} * p.selected.capacity;
    const int units = p.selected.counts[first + r];
    int residents = 0, misses = 0;
    for (int from = 0; from < units; from += kAdmitThreads * kAdmitStrip) {
      const int begin = from + Thread() * kAdmitStrip;
      int unit[kAdmitStrip], place[kAdmitStrip];
#pragma unroll
      for (int i = 0; i < kAdmitStrip; ++i) {
        if (begin + i < units) unit[i] = p.selected.units[list + begin + i];
      }
      uint32_t mine = 0;  // residents, and in the upper half misses: at most 2,048 in a chunk
#pragma unroll
      for (int i = 0; i < kAdmitStrip; ++i) {
        if (begin + i >= units) continue;
        place[i] = *place_of.At(unit[i]);
        mine += place[i] < 0 ? 0x10000u : 1u;
      }
      const BlockSum sum = ScanBlock(mine, select.totals);
      int resident_at = residents + static_cast<int>(sum.before & 0xFFFF);
      int missing_at = misses + static_cast<int>(sum.before >> 16);
      residents += static_cast<int>(sum.total & 0xFFFF);
      misses += static_cast<int>(sum.total >> 16);
#pragma unroll
      for (int i = 0; i < kAdmitStrip; ++i) {
        if (begin + i >= units) continue;
        if (place[i] < 0) {
          Missing(r)[missing_at++] = unit[i];
          continue;
        }
        p.resident[list + resident_at++] = place[i];
        places.At(place[i])[1] = last;
        Hold(place[i]);
      }
    }
    if (threadIdx.x == 0) {
      totals.misses[r] = misses;
      p.resident_counts[first + r] = residents;
      p.arriving_counts[first + r] = misses;
    }
  }

  // One warp: the positions to come that lack a place.
  __device__ void FindAhead(Totals& totals) {
    if (threadIdx.x >= 32) return;
    int lacking = 0;
    for (int from = 0; from < p.ahead; from += 32) {
      const int unit = last + 1 + from + Thread();
      const bool there = from + Thread() < p.ahead;
      const int place = there ? *place_of.At(unit) : 0;
      if (there && place >= 0) Hold(place);
      const unsigned lacks = __ballot_sync(0xFFFFFFFFu, there && place < 0);
      if (there && place < 0) ahead[lacking + __popc(lacks & ((1u << Thread()) - 1))] = unit;
      lacking += __popc(lacks);
    }
    if (threadIdx.x == 0) totals.ahead = lacking;
  }

  // Whether an earlier row misses it too.
  __device__ bool IsKnown(int r, int32_t unit, const Totals& totals) const {
    for (int other = 0; other < r; ++other) {
      const int at = LowerBound(Missing(other), totals.misses[other], unit);
      if (at < totals.misses[other] && Missing(other)[at] == unit) return true;
    }
    return false;
  }

  // The number of units that any row misses.
  __device__ int CountMissing(const Totals& totals) {
    if (rows == 1) return totals.misses[0];
    int all = 0;
    for (int r = 0; r < rows; ++r) {
      uint32_t so_far = 0;
      for (int from = 0; from < totals.misses[r]; from += kAdmitThreads) {
        const int i = from + Thread();
        const bool is_new = i < totals.misses[r] && !IsKnown(r, Missing(r)[i], totals);
        const BlockSum sum = ScanBlock(is_new ? 1 : 0, select.totals);
        if (i < totals.misses[r]) {
          Before(r)[i] = static_cast<uint16_t>(so_far + sum.before);
          Before(r)[i + 1] = static_cast<uint16_t>(so_far + sum.before + (is_new ? 1 : 0));
        }
        so_far += sum.total;
      }
      if (totals.misses[r] == 0 && threadIdx.x == 0) Before(r)[0] = 0;
      all += static_cast<int>(so_far);
    }
    __syncthreads();
    return all;
  }

  // The number of missing units before entry i of row r's, or -1 where an earlier row has it.
  __device__ int NumberOf(int r, int i, const Totals& totals) const {
    if (rows == 1) return i;
    if (Before(r)[i] == Before(r)[i + 1]) return -1;
    const int32_t unit = Missing(r)[i];
    int number = 0;
    for (int other = 0; other < rows; ++other) {
      number += Before(other)[LowerBound(Missing(other), totals.misses[other], unit)];
    }
    return number;
  }

  // Leaves in `given` the places to give, in order, in the lower halves.
  __device__ void ChoosePlaces(uint32_t wanted, const Totals& totals) {
    const PlaceKeys of_places = {places, keys, held, totals.low, l.kept, count};
    if (wanted == 1) {
      ChooseOne(of_places);
      return;
    }
    const int bits = 32 - __clz(static_cast<int>(totals.high - totals.low));
    uint32_t lacking;
    const SelectCut cut =
        FindSelectCut<kAdmitThreads>(of_places, bits, wanted, 1, 0, select, &lacking);
    if (lacking > 0 || totals.low > totals.high) __trap();
    VisitSelected<kAdmitThreads>(of_places, cut, select, [&](int place, uint32_t number) {
      given[number] = uint64_t{of_places.At(place)} << 32 | static_cast<uint32_t>(place);
    });
    __syncthreads();
    if (cut.below == 0) return;  // all of them have the lowest key
    if (wanted <= kRankedPlaces) {
      const int mine = Thread();
      const uint64_t key = mine < static_cast<int>(wanted) ? given[mine] : 0;
      int rank = 0;
      if (mine < static_cast<int>(wanted)) {
        for (uint32_t i = 0; i < wanted; ++i) rank += given[i] < key ? 1 : 0;
      }
      __syncthreads();
      if (mine < static_cast<int>(wanted)) given[rank] = key;
      __syncthreads();
      return;
    }
    SortGiven(static_cast<int>(wanted));
  }

  // What is left to do in most steps: a place for the next position.
  __device__ void ChooseOne(const PlaceKeys& of_places) {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    uint32_t least = kNeverSelected, place = kNeverSelected;
    for (int i = Thread(); i < count; i += kAdmitThreads) {
      const uint32_t key = of_places.At(i);
      if (key >= least) continue;
      least = key;
      place = static_cast<uint32_t>(i);
    }
    const uint32_t of_warp = __reduce_min_sync(kAll, least);
    place = __reduce_min_sync(kAll, least == of_warp ? place : kNeverSelected);
    if (threadIdx.x % 32 == 0) {
      select.counts[threadIdx.x / 32][0] = of_warp;
      select.counts[threadIdx.x / 32][1] = place;
    }
    __syncthreads();
    least = select.counts[threadIdx.x % 32][0];
    place = select.counts[threadIdx.x % 32][1];
    const uint32_t of_all = __reduce_min_sync(kAll, least);
    place = __reduce_min_sync(kAll, least == of_all ? place : kNeverSelected);
    if (of_all == kNeverSelected) __trap();
    if (threadIdx.x == 0) given[0] = place;
    __syncthreads();
  }

  // A bitonic network in which every comparison leaves the lesser key at the lower index, so that
  // there may be any number of them.
  __device__ void SortGiven(int number) {
    for (int size = 2; size / 2 < number; size *= 2) {
      for (int step = size / 2; step > 0; step /= 2) {
        // The first step of a size compares with the mirrored half.
        const int flip = step == size / 2 ? size - 1 : step;
        for (int pair = Thread(); pair < number; pair += kAdmitThreads) {
          const int low = 2 * pair - (pair & (step - 1)), high = low ^ flip;
          if (high >= number) continue;
          const uint64_t a = given[low], b = given[high];
          if (a > b) {
            given[low] = b;
            given[high] = a;
          }
        }
        __syncthreads();
      }
    }
  }

  __device__ void Put(int32_t unit, int32_t stamp, int place) {
    int32_t* const row = places.At(place);
    // What is put out and what comes are different units: there is no order among them.
    if (row[0] >= 0) *place_of.At(row[0]) = -1;
    row[0] = unit;
    row[1] = stamp;
    *place_of.At(unit) = place;
  }

  __device__ void Give(int moves, const Totals& totals) {
    for (int r = 0; r < rows; ++r) {
      const int64_t list = int64_t{first + r} * p.selected.capacity;
      for (int i = Thread(); i < totals.misses[r]; i += kAdmitThreads) {
        const int number = NumberOf(r, i, totals);
        if (number < 0) continue;
        const int32_t unit = Missing(r)[i];
        const int place = static_cast<int>(given[number] & 0xFFFFFFFFu);
        Put(unit, last, place);
        const int64_t move = int64_t{first} * p.move_capacity + number;
        p.source_units[move] = EntryNumber(p.home, slot, unit);
        p.target_units[move] = EntryNumber(p.pool, slot, place);
        if (rows == 1) p.arriving[list + i] = place;
      }
    }
    for (int i = Thread(); i < totals.ahead; i += kAdmitThreads) {
      Put(ahead[i], ahead[i], static_cast<int>(given[moves + i] & 0xFFFFFFFFu));
    }
    if (rows == 1) return;
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      const int64_t list = int64_t{first + r} * p.selected.capacity;
      for (int i = Thread(); i < totals.misses[r]; i += kAdmitThreads) {
        p.arriving[list + i] = *place_of.At(Missing(r)[i]);
      }
    }
  }

  // One thread.
  __device__ void Count(int moves, const Totals& totals) {
    int64_t selected = 0;
    for (int r = 0; r < rows; ++r) {
      p.move_counts[first + r] = r == 0 ? moves : 0;
      selected += p.selected.counts[first + r];
    }
    if (p.counters == nullptr) return;
    SparseCounters& counters = p.counters[slot];
    counters.steps += 1;
    counters.selected += selected;
    counters.missing += moves;
    counters.recalled += moves;
  }

  const AdmitParams& p;
  const AdmitLayout& l;
  SelectShared& select;
  uint64_t* const given;
  uint32_t* const keys;
  uint32_t* const held;
  int32_t* const missing;
  uint16_t* const before;
  int32_t* const ahead;
  const int first, rows, slot, last, count;
  const HeadTable place_of, places;
};

}  // namespace sluice::kernels::cuda
