// A list that Bring selects for, and how the blocks of its cluster do that.
#pragma once

#include "kernels/cuda/residency/bring.cuh"

namespace sluice::kernels::cuda {

// Returns whether the unit of a place behind the ring is listed there. A row that is computed again
// finds what leaves the ring behind it already.
__device__ __forceinline__ bool IsListed(const ListTables& t, int unit) {
  return unit >= 0 && !t.InRing(unit);
}

// A list that a cluster has, and this block's part of it.
class BringJob {
 public:
  __device__ BringJob(const BringParams& params, int of_list, int of_blocks, int of_rank,
                      const BringRuns& runs, int room, unsigned char* memory)
      : p(params),
        shared(*reinterpret_cast<BringShared*>(memory)),
        a(memory, runs.tokens, runs.places),
        t(params.residency, params.select.slots, params.select.positions, of_list,
          params.select.kv_heads, 1),
        list(of_list),
        blocks(of_blocks),
        rank(of_rank),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / 32),
        lane(thread % 32),
        tokens(t.position + 1),
        first_token(min(rank * runs.tokens, tokens)),
        first_place(min(t.ring + rank * runs.places, t.count)),
        places_of_run(runs.places),
        keys{p.select.scores + of_list * p.select.score_stride + first_token,
             a.keys,
             0,
             min(runs.tokens, tokens - first_token),
             p.select.first_units - first_token,
             tokens - p.select.last_units - first_token,
             {0, kNeverSelected - 1}},
        places{a.entries,  a.place_keys, KeyRange{}, 0, min(runs.places, t.count - first_place),
               t.position, t.ring,       0,          0} {
    keys.kept_count = min(keys.count, room);
    if (t.persistent) places.count = 0;
  }

  __device__ void Run() {
    Load();
    SelectTokens();
    MeetBlocks(blocks);
    Tell();
    const bool whole = p.whole && !t.persistent;
    int moves = 0;
    if (!t.persistent) {
      if (misses.all > 0) {
        ListMissing();
        moves = GivePlaces();
      }
      Update();
    }
    if (whole && p.by_place) {
      ListPlaces();
    } else if (whole) {
      MeetBlocks(blocks);
      ListTokens();
    } else {
      if (misses.all > 0) MeetBlocks(blocks);  // the tables are as they will be
      ListSelected(moves);
    }
    if (rank == 0 && thread == 0) {
      if (p.move_counts != nullptr) p.move_counts[list] = moves;
      SparseCounters& counters = p.counters[t.slot];
      Add(t.persistent ? &counters.held : &counters.selected, chosen.all);
      Add(&counters.missing, misses.all);
      Add(&counters.recalled, moves);
    }
    MeetBlocks(blocks);  // no block reads others any more
  }

 private:
  // How many of something the cluster has, and the blocks before this one.
  struct Counts {
    int all = 0, earlier = 0;
  };

  __device__ static void Add(int64_t* counter, int count) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter),
              static_cast<unsigned long long>(count));
  }

  // Reads scores and the table of places, and finds the range of their keys.
  __device__ void Load() {
    for (int i = thread; i < kScoreBins; i += kBringThreads) shared.score_bins[i] = 0;
    for (int i = thread; i < 3 * kSelectBins; i += kBringThreads)
      (&shared.select.bins[0][0])[i] = 0;
    for (int i = thread; i < places_of_run / 32; i += kBringThreads) a.given[i] = 0;
    if (thread == 0) {
      shared.told[0] = shared.told[1] = kNeverSelected;
      shared.told[2] = shared.told[4] = shared.told[5] = 0;
      shared.told[3] = 0xFFFFFFFFu;
      shared.near_counts[0] = 0;
    }
    __syncthreads();
    uint32_t best = kNeverSelected, low = kNeverSelected, high = 0;
    const auto take = [&](int i, uint32_t key) {
      best = min(best, key);
      if (keys.Forced(i)) return;
      low = min(low, key);
      if (key < kWorstKey) high = max(high, key);
    };
    for (int from = thread; from < keys.kept_count; from += kBringAtOnce * kBringThreads) {
      float loaded[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        loaded[j] = i < keys.kept_count ? __ldcg(keys.scores + i) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        if (i >= keys.kept_count) continue;
        a.keys[i] = RankKey(loaded[j]);
        take(i, a.keys[i]);
      }
    }
    for (int i = keys.kept_count + thread; i < keys.count; i += kBringThreads) take(i, keys.Raw(i));
    uint32_t oldest = 0xFFFFFFFFu, newest = 0;
    LoadPlaces(oldest, newest);
    best = __reduce_min_sync(kAllLanes, best);
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    oldest = __reduce_min_sync(kAllLanes, oldest);
    newest = __reduce_max_sync(kAllLanes, newest);
    if (lane == 0) {
      atomicMin(&shared.told[0], best);
      atomicMin(&shared.told[1], low);
      atomicMax(&shared.told[2], high);
      atomicMin(&shared.told[3], oldest);
      atomicMax(&shared.told[4], newest);
    }
    MeetBlocks(blocks);
    const uint4 none = {kNeverSelected, kNeverSelected, 0, 0xFFFFFFFFu};
    const uint4 told = lane < blocks ? ReadBlock(shared.told, lane, blocks) : none;
    const uint32_t told_newest = lane < blocks ? ReadBlock(shared.told + 4, lane, blocks).x : 0;
    best = __reduce_min_sync(kAllLanes, told.x);
    keys.range.low = __reduce_min_sync(kAllLanes, told.y);
    worst = ScoreOf(__reduce_max_sync(kAllLanes, told.z));
    places.oldest = static_cast<int>(__reduce_min_sync(kAllLanes, told.w) ^ 0x80000000u);
    places.newest = static_cast<int>(__reduce_max_sync(kAllLanes, told_newest) ^ 0x80000000u);
    if (!isinf(p.select.margin)) keys.range.limit = ~KeyOf(FloatOf(~best) - p.select.margin);
    places.range = keys.range;
  }

  // Reads the table of places, and the scores of the tokens that have them.
  __device__ void LoadPlaces(uint32_t& oldest, uint32_t& newest) {
    const float* const scores = p.select.scores + list * p.select.score_stride;
    constexpr int kPlacesAtOnce = 4;
    for (int from = thread; from < places.count; from += kPlacesAtOnce * kBringThreads) {
      int2 entry[kPlacesAtOnce];
      float score[kPlacesAtOnce];
#pragma unroll
      for (int j = 0; j < kPlacesAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        entry[j] = {-1, 0};
        if (i >= places.count) continue;
        const int32_t* const row = t.places.At(first_place + i);
        entry[j] = {row[0], row[1]};
      }
#pragma unroll
      for (int j = 0; j < kPlacesAtOnce; ++j) {
        score[j] = entry[j].x >= 0 && !p.forget ? __ldcg(scores + entry[j].x) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kPlacesAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        if (i >= places.count) continue;
        if (p.forget && entry[j].x >= 0) {
          *t.place_of.At(entry[j].x) = -1;
          entry[j].x = -1;
        }
        a.entries[i] = entry[j];
        if (entry[j].x < 0) continue;
        const bool forced = keys.Forced(entry[j].x - first_token);
        a.place_keys[i] = forced ? 0 : RankKey(score[j]);
        // Stamps as unsigned numbers of the same order.
        oldest = min(oldest, static_cast<uint32_t>(entry[j].y) ^ 0x80000000u);
        newest = max(newest, static_cast<uint32_t>(entry[j].y) ^ 0x80000000u);
      }
    }
  }

  // Returns the cut that leaves as many tokens as the list selects, or all that it may select.
  __device__ Cut FindCut() {
    const int forced = min(p.select.first_units, tokens);
    const int from = max(forced, tokens - p.select.last_units);
    const int wanted = KOfRow(p.select, tokens) - forced - (tokens - from);
    constexpr Cut kForcedOnly = Cut{1} << 32, kEverything = Cut{kNeverSelected} << 32;
    if (wanted <= 0) return kForcedOnly;
    const float best = ScoreOf(keys.range.low), scale = (kScoreBins - 1) / (best - worst);
    const auto bin_of = [&](uint32_t key) {
      return static_cast<int>(fminf((best - ScoreOf(key)) * scale, kScoreBins - 1.0f));
    };
    for (int i = thread; i < keys.count; i += kBringThreads) {
      if (keys.Forced(i)) continue;
      const uint32_t key = keys.Raw(i);
      if (key <= keys.range.limit) atomicAdd(shared.score_bins + bin_of(key), 1u);
    }
    MeetBlocks(blocks);
    uint32_t bins[4] = {};
    if (thread < kScoreBins / 4) {
#pragma unroll 8
      for (int block = 0; block < blocks; ++block) {
        const uint4 v = ReadBlock(shared.score_bins + 4 * thread, block, blocks);
        bins[0] += v.x, bins[1] += v.y, bins[2] += v.z, bins[3] += v.w;
      }
    }
    const BlockSum sum = ScanBlock(bins[0] + bins[1] + bins[2] + bins[3], shared.select.totals);
    if (sum.total <= static_cast<uint32_t>(wanted)) return kEverything;
    uint32_t before = sum.before;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (before < static_cast<uint32_t>(wanted) &&
          static_cast<uint32_t>(wanted) <= before + bins[j]) {
        shared.bin = static_cast<uint32_t>(4 * thread + j);
        shared.bin_before = before;
        shared.bin_count = bins[j];
      }
      before += bins[j];
    }
    __syncthreads();
    if (shared.bin_count > kMostNear) return FindCutByDigits();
    const int bin = static_cast<int>(shared.bin);
    for (int i = thread; i < keys.count; i += kBringThreads) {
      if (keys.Forced(i)) continue;
      const uint32_t key = keys.Raw(i);
      if (key > keys.range.limit || bin_of(key) != bin) continue;
      shared.near[atomicAdd(shared.near_counts, 1u)] =
          RankOf(keys.range.KeyOf(key), first_token + i);
    }
    MeetBlocks(blocks);
    return RankNear(wanted - static_cast<int>(shared.bin_before) - 1);
  }

  // Returns the cut behind the rank that has `number` smaller ones among those near the cut. Each
  // block looks for it among its own, a warp to a rank.
  __device__ Cut RankNear(int number) {
    const int of_lane =
        lane < blocks ? static_cast<int>(ReadBlock(shared.near_counts, lane, blocks).x) : 0;
    const int all = __reduce_add_sync(kAllLanes, of_lane);
    constexpr int kWarps = kBringThreads / 32;
    const int block = warp % blocks;  // the number of blocks is a power of two
    const int begin = __reduce_add_sync(kAllLanes, lane < block ? of_lane : 0);
    const int count = __shfl_sync(kAllLanes, of_lane, block);
    for (int i = warp / blocks * 32 + lane; i < count; i += kWarps / blocks * 32) {
      shared.all_near[begin + i] = LongWordOf(shared.near + i, block, blocks);
    }
    __syncthreads();
    const int own = __shfl_sync(kAllLanes, of_lane, rank);
    for (int i = warp; i < own; i += kWarps) {
      const uint64_t mine = shared.near[i];
      int below = 0;
      for (int j = lane; j < all; j += 32) below += shared.all_near[j] < mine ? 1 : 0;
      below = __reduce_add_sync(kAllLanes, below);
      if (below == number && lane < blocks) SetLongWordOf(&shared.cut, lane, mine + 1, blocks);
    }
    MeetBlocks(blocks);
    return shared.cut;
  }

  // Returns the same cut where too many scores are alike, as one finds it digit by digit.
  __device__ Cut FindCutByDigits() {
    uint32_t lacking;
    const SelectCut cut = FindSelectCut<kBringThreads>(
        keys, BitsOf(min(keys.range.limit, kWorstKey) - keys.range.low + 1),
        static_cast<uint32_t>(KOfRow(p.select, tokens)), blocks, rank, shared.select, &lacking);
    const int end = first_token + TieOf(cut);
    if (thread == 0) shared.told[5] = cut.equals > cut.earlier_equal ? end : 0;
    MeetBlocks(blocks);
    for (int i = thread; i < 3 * kSelectBins; i += kBringThreads)
      (&shared.select.bins[0][0])[i] = 0;
    const uint32_t told = lane < blocks ? ReadBlock(shared.told + 4, lane, blocks).y : 0;
    return RankOf(cut.below, static_cast<int>(__reduce_max_sync(kAllLanes, told)));
  }

  __device__ static int BitsOf(uint32_t most) { return 32 - __clz(static_cast<int>(most)); }

  // Returns the token of the run below which those that equal the cut are selected.
  __device__ int TieOf(const SelectCut& cut) {
    if (cut.equals <= cut.earlier_equal) return 0;
    const uint32_t wanted = cut.equals - cut.earlier_equal;
    if (thread == 0) shared.tie = keys.count;
    uint32_t equals = 0;
    for (int first = 0; first < keys.count && equals < wanted; first += kBringThreads) {
      const int i = first + thread;
      const bool equal = i < keys.count && keys.At(i) == cut.below;
      const BlockSum sum = ScanBlock(equal ? 1 : 0, shared.select.totals);
      if (equal && equals + sum.before + 1 == wanted) shared.tie = i + 1;
      equals += sum.total;
    }
    __syncthreads();
    return shared.tie;
  }

  // Marks the tokens that the cut leaves, and those of them that have no place.
  __device__ void SelectTokens() {
    const Cut cut = FindCut();
    places.cut = cut;
    for (int from = 0; from < keys.count; from += kBringAtOnce * kBringThreads) {
      bool selected[kBringAtOnce];
      int place[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads + thread;
        selected[j] = i < keys.count && RankOf(keys.At(i), first_token + i) < cut;
        place[j] = 0;
        if (!selected[j] || t.persistent || t.InRing(first_token + i)) continue;
        place[j] = p.forget ? -1 : *t.place_of.At(first_token + i);
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const unsigned of_selected = __ballot_sync(kAllLanes, selected[j]);
        const unsigned of_missing = __ballot_sync(kAllLanes, place[j] < 0);
        const int word = from / 32 + j * (kBringThreads / 32) + warp;
        if (lane == 0 && word * 32 < keys.count) {
          a.selected[word] = of_selected;
          a.missing[word] = of_missing;
        }
      }
    }
    __syncthreads();
    const int words = (keys.count + 31) / 32;
    const int of_selected = CountBits(a.selected, words, a.before_selected, shared.select.totals);
    const int of_missing = CountBits(a.missing, words, a.before_missing, shared.select.totals);
    if (thread == 0) {
      shared.counted[0] = static_cast<uint32_t>(of_selected);
      shared.counted[1] = static_cast<uint32_t>(of_missing);
    }
  }

  // Learns how many tokens every block selects, and how many of them miss.
  __device__ void Tell() {
    const uint4 counted =
        lane < blocks ? ReadBlock(shared.counted, lane, blocks) : uint4{0, 0, 0, 0};
    chosen = Sum(counted.x);
    misses = Sum(counted.y);
  }
  __device__ Counts Sum(uint32_t of_lane) const {
    Counts counts;
    counts.all = static_cast<int>(__reduce_add_sync(kAllLanes, of_lane));
    counts.earlier = static_cast<int>(__reduce_add_sync(kAllLanes, lane < rank ? of_lane : 0));
    return counts;
  }

  // Lists the missing tokens: their pieces as sources, and themselves for the places' side.
  __device__ void ListMissing() {
    const int64_t first = int64_t{list} * p.move_capacity + misses.earlier;
    for (int from = thread; from < keys.count; from += kBringAtOnce * kBringThreads) {
      int32_t piece[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        piece[j] = -1;
        if (i >= keys.count || !HasBit(a.missing, i)) continue;
        piece[j] = PieceIndex(p.home, t.slot, t.head, first_token + i, true);
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        if (piece[j] < 0) continue;
        const int64_t at = first + BitsBefore(a.missing, a.before_missing, i);
        p.target_units[at] = first_token + i;
        p.source_units[at] = piece[j];
      }
    }
  }

  // Finds the places that are given and whose turn each is. Returns how many in the cluster.
  __device__ int GivePlaces() {
    const bool none_held = places.newest < places.oldest;
    const auto span = static_cast<uint32_t>(places.newest) - static_cast<uint32_t>(places.oldest);
    uint32_t lacking;
    const SelectCut cut = FindSelectCut<kBringThreads>(places, none_held ? 1 : BitsOf(span + 1),
                                                       static_cast<uint32_t>(misses.all), blocks,
                                                       rank, shared.select, &lacking);
    VisitSelected<kBringThreads>(places, cut, shared.select, [&](int i, uint32_t number) {
      a.entries[i].y = static_cast<int>(number);
      atomicOr(a.given + i / 32, 1u << i % 32);
    });
    __syncthreads();
    return misses.all - static_cast<int>(lacking);
  }

  // Writes this block's places, and the pieces of those that are given.
  __device__ void Update() {
    int32_t* const numbers = p.target_units + int64_t{list} * p.move_capacity;
    for (int from = thread; from < places.count; from += kBringAtOnce * kBringThreads) {
      int unit[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        if (i < places.count && HasBit(a.given, i)) unit[j] = __ldcg(numbers + a.entries[i].y);
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        if (i >= places.count) continue;
        const int place = first_place + i, old = a.entries[i].x;
        int32_t* const row = t.places.At(place);
        if (HasBit(a.given, i)) {
          if (old >= 0) *t.place_of.At(old) = -1;
          row[0] = unit[j];
          row[1] = t.position;
          *t.place_of.At(unit[j]) = place;
          numbers[a.entries[i].y] = PieceIndex(p.cache, t.slot, t.head, place, true);
          a.entries[i].x = unit[j];
        } else if (places.Keeps(i)) {
          row[1] = t.position;
        } else if (p.forget && old == -1) {
          row[0] = -1;
        }
      }
    }
  }

  // Counts the bits that are set among `bits` of this block's, and learns how many every block has.
  __device__ Counts CountListed(const uint32_t* words, int bits, uint32_t* before) {
    __syncthreads();
    const int own = CountBits(words, (bits + 31) / 32, before, shared.select.totals);
    if (thread == 0) shared.counted[2] = static_cast<uint32_t>(own);
    MeetBlocks(blocks);
    return Sum(lane < blocks ? ReadBlock(shared.counted, lane, blocks).z : 0);
  }

  // Lists every token that has a place, in the order of places.
  __device__ void ListPlaces() {
    __syncthreads();
    for (int from = 0; from < places.count; from += kBringThreads) {
      const int i = from + thread;
      const unsigned held =
          __ballot_sync(kAllLanes, i < places.count && IsListed(t, a.entries[i].x));
      const int word = from / 32 + warp;
      if (lane == 0 && word * 32 < places.count) a.held[word] = held;
    }
    const Counts listed = CountListed(a.held, places.count, a.before_held);
    const int of_ring = min(t.ring, tokens);
    const int64_t first = int64_t{list} * p.resident.capacity;
    int32_t* const units = p.resident.units + first;
    if (of_ring + listed.all > p.resident.capacity) __trap();
    if (rank == 0) {
      for (int i = thread; i < of_ring; i += kBringThreads) {
        units[i] = t.UnitInRing(i);
        p.places[first + i] = i;
      }
      if (thread == 0) p.resident.counts[list] = of_ring + listed.all;
    }
    for (int i = thread; i < places.count; i += kBringThreads) {
      if (!HasBit(a.held, i)) continue;
      const int at = of_ring + listed.earlier + BitsBefore(a.held, a.before_held, i);
      units[at] = a.entries[i].x;
      p.places[first + at] = first_place + i;
    }
  }

  // Lists every token that has a place, in the order of tokens.
  __device__ void ListTokens() {
    for (int from = 0; from < keys.count; from += kBringAtOnce * kBringThreads) {
      bool held[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads + thread;
        held[j] = i < keys.count && PlaceNow(first_token + i) >= 0;
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const unsigned of_held = __ballot_sync(kAllLanes, held[j]);
        const int word = from / 32 + j * (kBringThreads / 32) + warp;
        if (lane == 0 && word * 32 < keys.count) a.selected[word] = of_held;
      }
    }
    const Counts listed = CountListed(a.selected, keys.count, a.before_selected);
    const int64_t first = int64_t{list} * p.resident.capacity;
    if (listed.all > p.resident.capacity) __trap();
    for (int i = thread; i < keys.count; i += kBringThreads) {
      if (!HasBit(a.selected, i)) continue;
      const int at = listed.earlier + BitsBefore(a.selected, a.before_selected, i);
      p.resident.units[first + at] = first_token + i;
      p.places[first + at] = PlaceNow(first_token + i);
    }
    if (rank == 0 && thread == 0) p.resident.counts[list] = listed.all;
  }

  // Returns the place of a token as the tables are now that places were given.
  __device__ __forceinline__ int PlaceNow(int token) const {
    return t.InRing(token) ? token % t.ring
           : t.persistent  ? t.ring + token
                           : __ldcg(t.place_of.At(token));
  }

  // Lists the selected tokens that have a place: all but the missing ones behind the first `moves`.
  __device__ void ListSelected(int moves) {
    const int64_t first = int64_t{list} * p.resident.capacity;
    if (chosen.all > p.resident.capacity) __trap();
    for (int from = thread; from < keys.count; from += kBringAtOnce * kBringThreads) {
      int at[kBringAtOnce], place[kBringAtOnce];
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        const int i = from + j * kBringThreads;
        at[j] = -1;
        if (i >= keys.count || !HasBit(a.selected, i)) continue;
        const int of_missing = misses.earlier + BitsBefore(a.missing, a.before_missing, i);
        if (HasBit(a.missing, i) && of_missing >= moves) continue;
        at[j] = chosen.earlier + BitsBefore(a.selected, a.before_selected, i) -
                max(0, of_missing - moves);
        place[j] = PlaceNow(first_token + i);
      }
#pragma unroll
      for (int j = 0; j < kBringAtOnce; ++j) {
        if (at[j] < 0) continue;
        p.resident.units[first + at[j]] = first_token + from + j * kBringThreads;
        p.places[first + at[j]] = place[j];
      }
    }
    if (rank == 0 && thread == 0) p.resident.counts[list] = chosen.all - (misses.all - moves);
  }

  const BringParams& p;
  BringShared& shared;
  const BringArrays a;
  const ListTables t;
  const int list, blocks, rank;
  const int thread, warp, lane;
  const int tokens;  // of the row
  const int first_token, first_place, places_of_run;
  TokenKeys keys;
  PlaceKeys places;
  float worst = 0;  // the worst score, but for -inf
  Counts chosen, misses;
};

}  // namespace sluice::kernels::cuda
