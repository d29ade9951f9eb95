// Token residency of whole sequences: UpdateResidency, by one block to a sequence.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/residency/update_residency_places.cuh"
#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

inline constexpr int kUpdateStrip = 4;    // entries of a list that a thread takes at a time
inline constexpr int kStagedPages = 512;  // page numbers of a table that lie in shared memory

// Layout of a block's shared memory: SelectShared, then the arrays at the `_at` offsets, in
// bytes.
struct UpdateLayout {
  int32_t rows;   // rows of a sequence, at most
  int32_t lists;  // entries of a list
  int32_t kept;   // places whose keys are kept
  int32_t given;  // places that one call may give a sequence
  int32_t given_at, keys_at, held_at, missing_at, before_at, ahead_at, bytes;
};
inline UpdateLayout MakeUpdateLayout(const UpdateResidencyParams& p) {
  UpdateLayout l{};
  l.rows = p.in_turn ? 1 : p.rows < kMaxQueryPositions ? p.rows : kMaxQueryPositions;
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
  l.given_at = put(std::max(int64_t{8} * l.given, int64_t{4} * kRankedPlaces));
  l.keys_at = put(int64_t{4} * l.kept);
  l.held_at = put((int64_t{p.residency.count} + 31) / 32 * 4);
  l.missing_at = put(int64_t{4} * l.rows * l.lists);
  l.before_at = put(int64_t{2} * l.rows * (l.lists + 1));
  l.ahead_at = put(int64_t{4} * p.ahead);
  l.bytes = end;
  return l;
}

// Returns the number of elements of an ascending list that are below `unit`.
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

// Handles a row of a sequence that is whole (UpdateResidencyParams::whole): 2,048 entries are
// copied, in the time of one dependent load. `begins` and `ends` say that it is the sequence's
// first and last row.
__device__ __forceinline__ void UpdateWhole(const UpdateResidencyParams& p, int row, int slot,
                                            bool begins, bool ends) {
  const int last = p.positions[row], t = static_cast<int>(threadIdx.x);
  const int64_t list = int64_t{row} * p.selected.capacity;
  // No kernel of a step writes tables of pages.
  const int unit = last + 1 + t;
  const bool ahead = ends && t < p.ahead;
  int32_t* const place_of = ahead ? RowAt<int32_t>(p.residency.place_of, slot, unit, 0) : nullptr;
  int32_t* const place = ahead ? RowAt<int32_t>(p.residency.places, slot, unit, 0) : nullptr;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int units = p.selected.counts[row];
  int32_t strip[kUpdateStrip];
#pragma unroll
  for (int i = 0; i < kUpdateStrip; ++i) {
    const int at = t + i * kUpdateThreads;
    if (at < p.selected.capacity) strip[i] = p.selected.units[list + at];
  }
#pragma unroll
  for (int i = 0; i < kUpdateStrip; ++i) {
    const int at = t + i * kUpdateThreads;
    if (at < units) p.resident[list + at] = strip[i];
  }
  for (int at = t + kUpdateStrip * kUpdateThreads; at < units; at += kUpdateThreads) {
    p.resident[list + at] = p.selected.units[list + at];
  }
  if (ahead) {
    *place_of = unit;
    place[0] = unit;
    place[1] = unit;
  }
  if (t != 0) return;
  p.resident_counts[row] = units;
  p.arriving_counts[row] = p.move_counts[row] = 0;
  if (p.counters == nullptr || p.speculative) return;
  const auto add = [](int64_t& counter, int number) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
              static_cast<unsigned long long>(number));
  };
  if (begins) add(p.counters[slot].steps, 1);
  add(p.counters[slot].selected, units);
}

// The work of a block: the sequence of rows [first, first + rows).
class ResidencyUpdate {
 public:
  // `stamps_places` is true if no other block stamps.
  __device__ ResidencyUpdate(const UpdateResidencyParams& params, const UpdateLayout& layout,
                             int first_row, int row_count, bool stamps_places,
                             unsigned char* memory)
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
        stamps(stamps_places),
        slot(p.slots[first_row]),
        last(p.positions[first_row + row_count - 1]),
        count(p.residency.count),
        place_of(p.residency.place_of, slot, 0),
        coming(place_of),
        places(p.residency.places, slot, 0) {}

  // Does the work that needs nothing that kernels write.
  __device__ void Prepare() {
    __shared__ int32_t pages[2][kStagedPages];
    Stage(coming, (last + p.ahead) / p.residency.place_of.rows_per_page + 1, pages[0]);
    const int per_page = p.residency.places.rows_per_page;
    Stage(places, (count + per_page - 1) / per_page, pages[1]);
    for (int i = Thread(); i < kSelectBins; i += kUpdateThreads) select.bins[0][i] = 0;
    for (int i = Thread(); i < (count + 31) / 32; i += kUpdateThreads) held[i] = 0;
    __syncthreads();
  }

  __device__ void Run() {
    __shared__ Totals totals;
    __shared__ PlaceEnds::Shared of_ends;
    if (p.forget) Forget();
    // The loads of each round are under way together.
    int units = p.selected.counts[first], unit[kUpdateStrip];
    FetchUnits(0, 0, unit);
    PlaceEnds ends(places, count, of_ends);
    if (threadIdx.x == 0) totals.found = 0;
    const PlaceEnds::Asked first_round = ends.AskFirst();
    FindAhead(totals);
    ends.TakeFirst(first_round);
    __syncthreads();
    const PlaceEnds::Asked second_round = ends.AskSecond();
    int64_t selected = 0;
    for (int r = 0, turn = 0; r < rows; ++r) {
      if (r > 0) units = p.selected.counts[first + r];
      selected += units;
      SplitRow(r, units, unit, turn, totals);
    }
    ends.TakeSecond(second_round);
    __syncthreads();
    ends.Finish();
    residents = totals.residents;
    const int moves = CountMissing(totals), wanted = moves + totals.ahead;
    if (moves > p.move_capacity) __trap();
    if (threadIdx.x == kUpdateThreads - 32) {
      Count(moves, selected);
      if (Notes()) p.journal.counts[JournalList()] = residents + wanted;
    }
    if (wanted == 0) return;
    // No place is free twice: places that UpdateResidency gives are taken in the same call.
    const int free = wanted <= ends.had() - ends.taken() ? ends.taken() : -1;
    if (free < 0) {
      PlaceChoice(places, ends.had(), held, keys, l.kept, select, &totals.found)
          .Choose(static_cast<uint32_t>(wanted), given);
    }
    Give(moves, free, totals);
  }

  // Another block's part beside the sequence's own: it stamps the selected units that have a
  // place, by scattered stores of a sector each. Places that the other block gives meanwhile get
  // the same stamp, and units that it evicts were not selected.
  __device__ void Stamp() const {
    for (int r = 0; r < rows; ++r) {
      const int units = p.selected.counts[first + r];
      for (int from = 0; from < units; from += kUpdateThreads * kUpdateStrip) {
        int unit[kUpdateStrip], place[kUpdateStrip];
        FetchUnits(r, from, unit);
#pragma unroll
        for (int i = 0; i < kUpdateStrip; ++i) {
          place[i] = EntryOf(from, i) < units ? *coming.At(unit[i]) : -1;
        }
#pragma unroll
        for (int i = 0; i < kUpdateStrip; ++i) {
          if (place[i] >= 0) places.At(place[i])[1] = last;
        }
      }
    }
  }

 private:
  struct Totals {
    // totals of warps, used in turn: residents, and in the upper half misses
    uint32_t split[2][32];
    int misses[kMaxQueryPositions];
    int residents;   // of the last row
    int ahead;       // positions ahead that lack a place
    uint32_t found;  // places that may be given
  };

  __device__ static int Thread() { return static_cast<int>(threadIdx.x); }
  __device__ int32_t* Missing(int r) const { return missing + r * l.lists; }
  // Entry i is the number of the row's missing units before i that no earlier row misses.
  __device__ uint16_t* Before(int r) const { return before + r * (l.lists + 1); }

  __device__ static void Stage(HeadTable& table, int number, int32_t* copy) {
    if (number > kStagedPages) return;
    for (int i = Thread(); i < number; i += kUpdateThreads) copy[i] = table.pages()[i];
    table.ReadPagesFrom(copy);
  }

  __device__ void Forget() {
    for (int place = Thread(); place < count; place += kUpdateThreads) {
      int32_t* const row = places.At(place);
      if (row[0] < 0) continue;
      *place_of.At(row[0]) = -1;
      row[0] = -1;
    }
    __syncthreads();
  }

  __device__ bool Notes() const { return p.in_turn && p.journal.rows > 0; }
  __device__ int64_t JournalList() const {
    return int64_t{slot} * p.journal.rows + last % p.journal.rows;
  }
  // Writes down, as number `at` of the row's list, what a place holds before it changes.
  __device__ void Note(int at, int place, int unit, int stamp) const {
    const int64_t to = JournalList() * p.journal.capacity + at;
    p.journal.places[to] = place;
    p.journal.units[to] = unit;
    p.journal.stamps[to] = stamp;
  }

  __device__ void Hold(int place) { atomicOr(held + place / 32, 1u << place % 32); }

  // A warp has 32 * kUpdateStrip neighbouring entries of a chunk, a lane every 32nd.
  __device__ static int EntryOf(int from, int i) {
    return from + Thread() / 32 * 32 * kUpdateStrip + i * 32 + Thread() % 32;
  }
  __device__ void FetchUnits(int r, int from, int (&unit)[kUpdateStrip]) const {
    const int32_t* const list = p.selected.units + int64_t{first + r} * p.selected.capacity;
#pragma unroll
    for (int i = 0; i < kUpdateStrip; ++i) {
      const int at = EntryOf(from, i);
      if (at < p.selected.capacity) unit[i] = list[at];
    }
  }

  // Splits a row's list into places that it has, and units that have none. `unit` holds the first
  // row's first units. `turn` is the index in totals.split and goes on from row to row, because a
  // warp may still read the values that the last chunk of the row before wrote.
  __device__ void SplitRow(int r, int units, int (&unit)[kUpdateStrip], int& turn, Totals& totals) {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    const int64_t list = int64_t{first + r} * p.selected.capacity;
    const int warp = Thread() / 32, lane = Thread() % 32;
    const unsigned lanes_before = (1u << lane) - 1;
    int residents = 0, misses = 0;
    for (int from = 0; from < units; from += kUpdateThreads * kUpdateStrip, turn ^= 1) {
      if (r + from > 0) FetchUnits(r, from, unit);
      int place[kUpdateStrip];
#pragma unroll
      for (int i = 0; i < kUpdateStrip; ++i) {
        if (EntryOf(from, i) < units) place[i] = *coming.At(unit[i]);
      }
      unsigned has[kUpdateStrip], lacks[kUpdateStrip];
      uint32_t of_warp = 0;
#pragma unroll
      for (int i = 0; i < kUpdateStrip; ++i) {
        const bool there = EntryOf(from, i) < units;
        has[i] = __ballot_sync(kAll, there && place[i] >= 0);
        lacks[i] = __ballot_sync(kAll, there && place[i] < 0);
        of_warp += static_cast<uint32_t>(__popc(has[i]) | __popc(lacks[i]) << 16);
      }
      if (lane == 0) totals.split[turn][warp] = of_warp;
      __syncthreads();
      const uint32_t of_lane = lane < kUpdateWarps ? totals.split[turn][lane] : 0;
      const uint32_t earlier = __reduce_add_sync(kAll, lane < warp ? of_lane : 0);
      const uint32_t all = __reduce_add_sync(kAll, of_lane);
      int resident_at = residents + static_cast<int>(earlier & 0xFFFF);
      int missing_at = misses + static_cast<int>(earlier >> 16);
      residents += static_cast<int>(all & 0xFFFF);
      misses += static_cast<int>(all >> 16);
#pragma unroll
      for (int i = 0; i < kUpdateStrip; ++i) {
        if ((lacks[i] >> lane & 1) != 0) {
          Missing(r)[missing_at + __popc(lacks[i] & lanes_before)] = unit[i];
        } else if ((has[i] >> lane & 1) != 0) {
          const int at = resident_at + __popc(has[i] & lanes_before);
          p.resident[list + at] = place[i];
          if (Notes()) Note(at, place[i], unit[i], places.At(place[i])[1]);
          if (stamps) places.At(place[i])[1] = last;
          Hold(place[i]);
        }
        resident_at += __popc(has[i]);
        missing_at += __popc(lacks[i]);
      }
    }
    if (threadIdx.x == 0) {
      totals.misses[r] = misses;
      totals.residents = residents;
      p.resident_counts[first + r] = residents;
      p.arriving_counts[first + r] = misses;
    }
  }

  // Finds the positions ahead that lack a place. Only the last warp works.
  __device__ void FindAhead(Totals& totals) {
    if (threadIdx.x < kUpdateThreads - 32) return;
    const int lane = Thread() % 32;
    int lacking = 0;
    for (int from = 0; from < p.ahead; from += 32) {
      const int unit = last + 1 + from + lane;
      const bool there = from + lane < p.ahead;
      const int place = there ? *coming.At(unit) : 0;
      if (there && place >= 0) Hold(place);
      const unsigned lacks = __ballot_sync(0xFFFFFFFFu, there && place < 0);
      if (there && place < 0) ahead[lacking + __popc(lacks & ((1u << lane) - 1))] = unit;
      lacking += __popc(lacks);
    }
    if (lane == 0) totals.ahead = lacking;
  }

  // Returns true if an earlier row misses the unit too.
  __device__ bool IsKnown(int r, int32_t unit, const Totals& totals) const {
    for (int other = 0; other < r; ++other) {
      const int at = LowerBound(Missing(other), totals.misses[other], unit);
      if (at < totals.misses[other] && Missing(other)[at] == unit) return true;
    }
    return false;
  }

  // Returns the number of units that any row misses.
  __device__ int CountMissing(const Totals& totals) {
    if (rows == 1) return totals.misses[0];
    int all = 0;
    for (int r = 0; r < rows; ++r) {
      uint32_t so_far = 0;
      for (int from = 0; from < totals.misses[r]; from += kUpdateThreads) {
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

  // Returns the number of missing units before entry i of row r, or -1 if an earlier row has the
  // unit.
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

  // Puts the unit into place `number` of those given: of the free ones from `free` on, or of
  // `given`.
  __device__ int Put(int32_t unit, int32_t stamp, int number, int free) {
    const int place = free >= 0 ? free + number : static_cast<int>(given[number] & 0xFFFFFFFFu);
    int32_t* const row = places.At(place);
    // Evicted and arriving units are different, so these stores need no order.
    const int old = free >= 0 ? -1 : row[0];
    if (Notes()) Note(residents + number, place, old, row[1]);
    row[0] = unit;
    row[1] = stamp;
    *coming.At(unit) = place;
    if (old >= 0) *place_of.At(old) = -1;
    return place;
  }

  __device__ void Give(int moves, int free, const Totals& totals) {
    for (int r = 0; r < rows; ++r) {
      const int64_t list = int64_t{first + r} * p.selected.capacity;
      for (int i = Thread(); i < totals.misses[r]; i += kUpdateThreads) {
        const int number = NumberOf(r, i, totals);
        if (number < 0) continue;
        const int32_t unit = Missing(r)[i];
        const int32_t source = EntryNumber(p.home, slot, unit);
        const int place = Put(unit, last, number, free);
        const int64_t move = int64_t{first} * p.move_capacity + number;
        p.source_units[move] = source;
        p.target_units[move] = EntryNumber(p.pool, slot, place);
        if (rows == 1) p.arriving[list + i] = place;
      }
    }
    for (int i = kUpdateThreads - 1 - Thread(); i < totals.ahead; i += kUpdateThreads) {
      Put(ahead[i], ahead[i], moves + i, free);
    }
    if (rows == 1) return;
    __syncthreads();
    for (int r = 0; r < rows; ++r) {
      const int64_t list = int64_t{first + r} * p.selected.capacity;
      for (int i = Thread(); i < totals.misses[r]; i += kUpdateThreads) {
        p.arriving[list + i] = *place_of.At(Missing(r)[i]);
      }
    }
  }

  // Counts. One thread calls it.
  __device__ void Count(int moves, int64_t selected) {
    for (int r = 0; r < rows; ++r) p.move_counts[first + r] = r == 0 ? moves : 0;
    if (p.counters == nullptr) return;
    SparseCounters& counters = p.counters[slot];
    const auto add = [](int64_t& counter, int64_t number) {  // nobody waits for it
      atomicAdd(reinterpret_cast<unsigned long long*>(&counter),
                static_cast<unsigned long long>(number));
    };
    add(counters.recalled, moves);
    if (p.speculative) return;
    add(counters.steps, 1);
    add(counters.selected, selected);
    add(counters.missing, moves);
  }

  const UpdateResidencyParams& p;
  const UpdateLayout& l;
  SelectShared& select;
  uint64_t* const given;
  uint32_t* const keys;
  uint32_t* const held;
  int32_t* const missing;
  uint16_t* const before;
  int32_t* const ahead;
  const int first, rows;
  const bool stamps;
  const int slot, last, count;
  int residents = 0;  // selected units of the last row that had a place
  const HeadTable place_of;
  HeadTable coming;  // place_of of positions up to the last one ahead
  HeadTable places;
};

}  // namespace sluice::kernels::cuda
