// Divides sparse MLA's work, for any way to attend to one piece of a list (`Core`):
//   Vectors      the path's vectors (simd_math.h)
//   Scratch      a worker's working memory, on its stack
//   kSplitHeads  most heads of a piece
//   AttendPiece(p, piece, scratch, outs, lse)
//                computes o [heads][rank], normalised, and lse of the piece's heads over its
//                entries
// A core gives a head one fixed sequence of operations, whatever its neighbours in the piece are.
//
// A list is cut into pieces of kMlaSplitEntries, and the pieces of a head merge in order, behind
// `other`. Where few rows have room in the params' scratch, a worker's item is a piece, and a
// second phase merges; else it is a row and some heads, whose pieces merge on the way, to the same
// bits.
#pragma once

#include "kernels/cpu/simd_latent.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMlaWholeHeads = 128;  // most heads of an item that merges on the way
constexpr int64_t kMlaSplitRows = 16;    // most rows whose pieces are items
constexpr int64_t kMlaMaxHeads = 256;

// Some heads of one row, over entries [begin, end) of its list.
struct MlaPiece {
  int64_t row;
  int64_t head;
  int64_t heads;
  int64_t begin;
  int64_t end;
};

inline int64_t MlaEntries(const SparseMlaParams& p, int64_t row) {
  return p.slots[row] < 0 ? 0 : Max(0, Min(p.counts[row], p.capacity));
}

// Returns the number of entry i of a row's list.
inline int64_t MlaEntry(const SparseMlaParams& p, int64_t row, int64_t i) {
  return p.entries != nullptr ? p.entries[row * p.capacity + i] : i;
}

inline const char* MlaEntryData(const SparseMlaParams& p, int64_t row, int64_t i) {
  return static_cast<const char*>(p.cache.base) +
         EntryOffset(p.cache, p.slots[row], MlaEntry(p, row, i));
}

// Asks for entry i of a row's list, if there is one.
inline void AskEntry(const SparseMlaParams& p, int64_t row, int64_t i, int64_t bytes) {
  if (i >= MlaEntries(p, row)) return;
  const char* at = MlaEntryData(p, row, i);
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
}

// The scratch of split rows: [rows][pieces][heads][rank], then [rows][pieces][heads] of lse. Rows
// [0, rows) have room.
struct MlaSplits {
  explicit MlaSplits(const SparseMlaParams& p)
      : pieces(Max(1, CeilDiv(p.capacity, kMlaSplitEntries))), heads(p.heads), rank(p.cache.rank) {
    const int64_t room = p.scratch_bytes / (pieces * heads * (rank + 1) * 4);
    rows = p.rows > kMlaSplitRows ? 0 : Min(p.rows, room);
    outs = static_cast<float*>(p.scratch);
    lse = outs + rows * pieces * heads * rank;
  }
  int64_t At(int64_t row, int64_t piece, int64_t head) const {
    return (row * pieces + piece) * heads + head;
  }
  int64_t pieces, heads, rank;
  int64_t rows;
  float* outs;
  float* lse;
};

// Returns a head's state before its pieces: the other result, if there is one.
template <class S>
MergeState StartHead(const SparseMlaParams& p, int64_t row, int64_t head, float* o) {
  MergeState state;
  if (p.slots[row] < 0 || p.other_o == nullptr) return state;
  const int64_t at = row * p.heads + head;
  MergePart<S>(state, o, p.other_o + at * p.cache.rank, p.other_lse[at], p.cache.rank);
  return state;
}

template <class S>
void FinishHead(const SparseMlaParams& p, int64_t row, int64_t head, const MergeState& state,
                const float* o) {
  const int64_t at = row * p.heads + head;
  FinishMerge<S>(state, o, p.cache.rank, p.out, p.out_type, at * p.cache.rank,
                 p.lse != nullptr ? p.lse + at : nullptr);
}

inline void CheckSparseMla(const SparseMlaParams& p) {
  CheckLatents(p.cache, "sparse_mla: rank <= 512, rope <= 64, multiples of 16; packed: 512 and 64");
  if (p.heads > kMlaMaxHeads) KernelCheckFailed("sparse_mla: up to 256 heads");
}

// Computes all pieces of some heads of a row and merges them on the way.
template <class Core>
struct MlaWholeItem {
  typename Core::Scratch scratch;
  alignas(64) float outs[kMlaWholeHeads * kMaxLatentRank];    // of this piece
  alignas(64) float merged[kMlaWholeHeads * kMaxLatentRank];  // of the pieces so far
  float lse[kMlaWholeHeads];
  MergeState state[kMlaWholeHeads];

  void Run(const SparseMlaParams& p, int64_t row, int64_t head, int64_t heads) {
    using S = typename Core::Vectors;
    const int64_t rank = p.cache.rank, entries = MlaEntries(p, row);
    for (int64_t h = 0; h < heads; ++h)
      state[h] = StartHead<S>(p, row, head + h, merged + h * rank);
    for (int64_t begin = 0; begin < entries; begin += kMlaSplitEntries) {
      const int64_t end = Min(begin + kMlaSplitEntries, entries);
      Core::AttendPiece(p, {row, head, heads, begin, end}, scratch, outs, lse);
      for (int64_t h = 0; h < heads; ++h) {
        MergePart<S>(state[h], merged + h * rank, outs + h * rank, lse[h], rank);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      FinishHead<S>(p, row, head + h, state[h], merged + h * rank);
    }
  }
};

template <class Core>
[[gnu::noinline]] void RunWholeItem(const SparseMlaParams& p, int64_t row, int64_t head,
                                    int64_t heads) {
  MlaWholeItem<Core> item;
  item.Run(p, row, head, heads);
}

template <class Core>
[[gnu::noinline]] void RunSplitItem(const SparseMlaParams& p, const MlaSplits& splits,
                                    const MlaPiece& piece) {
  typename Core::Scratch scratch;
  const int64_t at = splits.At(piece.row, piece.begin / kMlaSplitEntries, piece.head);
  Core::AttendPiece(p, piece, scratch, splits.outs + at * splits.rank, splits.lse + at);
}

// Returns how many heads an item of a split row has: as many as may be, or fewer where there would
// not be items for all workers. No bit depends on it.
inline int64_t SplitHeads(const SparseMlaParams& p, const MlaSplits& splits, int64_t most,
                          int workers) {
  int64_t pieces = 0;
  for (int64_t r = 0; r < splits.rows; ++r) pieces += CeilDiv(MlaEntries(p, r), kMlaSplitEntries);
  int64_t heads = Min(p.heads, most);
  while (heads > 16 && pieces * CeilDiv(p.heads, heads) < workers) {
    heads = CeilDiv(CeilDiv(heads, 2), 16) * 16;
  }
  return heads;
}

// Returns the same for rows that are not split. An item converts its entries once for all its
// heads, so it has fewer heads only where there would not be four items for each worker.
inline int64_t WholeHeads(const SparseMlaParams& p, const MlaSplits& splits, int workers) {
  int64_t heads = kMlaWholeHeads;
  while (heads > 32 && (p.rows - splits.rows) * CeilDiv(p.heads, heads) < 4 * workers) heads /= 2;
  return heads;
}

// Walks items in order, cut into shares of equal cost: a worker runs those whose cost begins in its
// share.
template <class Core>
void SparseMla(const SparseMlaParams& p, Worker worker) {
  CheckSparseMla(p);
  const MlaSplits splits(p);
  const int64_t split_heads = SplitHeads(p, splits, Core::kSplitHeads, worker.count);
  const int64_t whole_heads = WholeHeads(p, splits, worker.count);
  // Calls body(piece, whether the row is split) for every item, until it says to stop.
  const auto for_each = [&](auto body) {
    for (int64_t r = 0; r < p.rows; ++r) {
      const bool split = r < splits.rows;
      const int64_t entries = MlaEntries(p, r);
      const int64_t step = split ? kMlaSplitEntries : Max(1, entries);
      const int64_t group = split ? split_heads : whole_heads;
      for (int64_t begin = 0; begin < (split ? entries : step); begin += step) {
        for (int64_t h = 0; h < p.heads; h += group) {
          body(MlaPiece{r, h, Min(group, p.heads - h), begin, Min(begin + step, entries)}, split);
        }
      }
    }
  };
  // An empty list costs something, so that it is in some worker's share.
  const auto cost_of = [](const MlaPiece& piece) {
    return (Max(0, piece.end - piece.begin) * (piece.heads + 8)) + 1;
  };
  int64_t total = 0;
  for_each([&](const MlaPiece& piece, bool) { total += cost_of(piece); });
  const Range mine = Share(total, worker);
  int64_t cost = 0;
  for_each([&](const MlaPiece& piece, bool split) {
    const int64_t start = cost;
    cost += cost_of(piece);
    if (start < mine.begin || start >= mine.end) return;
    if (split) {
      RunSplitItem<Core>(p, splits, piece);
    } else {
      RunWholeItem<Core>(p, piece.row, piece.head, piece.heads);
    }
  });
}

// The second phase: merges the heads of split rows.
template <class S>
void SparseMlaMerge(const SparseMlaParams& p, Worker worker) {
  const MlaSplits splits(p);
  const Range mine = Share(splits.rows * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t row = item / p.heads, head = item % p.heads;
    alignas(64) float o[kMaxLatentRank];
    MergeState state = StartHead<S>(p, row, head, o);
    const int64_t pieces = CeilDiv(MlaEntries(p, row), kMlaSplitEntries);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t at = splits.At(row, piece, head);
      MergePart<S>(state, o, splits.outs + at * splits.rank, splits.lse[at], splits.rank);
    }
    FinishHead<S>(p, row, head, state, o);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
