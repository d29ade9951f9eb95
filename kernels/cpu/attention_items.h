// Divides attention's work into units, for any way to attend to one split (`Core`):
//   Vectors                 the path's vectors (simd_math.h)
//   Scratch                 a worker's working memory, derived from ItemScratch; on its stack
//   CostPerToken(queries)   work per token of context of a tile with so many queries
//   LoadQueries(p, unit, s) loads the unit's queries, scaled, in the core's own form
//   AttendSplit(cache, place, next, queries, s)
//                           computes s.outs and s.lse of every query over the tokens of `place`;
//                           `next` is the place of this worker's next call
// A place is a part of a sequence, or of a list of units (sparse_items.h): a core finds its tokens
// by Locate() alone, 16 at a time, or one by one where they lie scattered. A core gives a query one
// fixed sequence of operations, whatever its neighbours in the tile are.
#pragma once

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kPieceTokens = 16;  // never crosses a block: blocks are multiples of 16 tokens

// The part of a worker's memory that items need. Query q of a tile is row q / heads, head q %
// heads.
struct ItemScratch {
  alignas(64) float outs[kMaxQueries * kMaxHeadDim];    // of this split, [queries][head_dim]
  alignas(64) float merged[kMaxQueries * kMaxHeadDim];  // of the splits so far
  float lse[kMaxQueries];
  int32_t last_token[kMaxQueries];  // position of the query's row
  MergeState state[kMaxQueries];
};

// The tokens [begin, end) of one KV head of a sequence, or of a list. An empty range is no place.
struct SplitPlace {
  int64_t slot = -1;
  int64_t kv_head = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // Token t lies at token units[t / unit_tokens] * unit_tokens + t % unit_tokens of the cache;
  // null: at token t.
  const int32_t* units = nullptr;
  int64_t unit_tokens = 1;

  // Returns whether 16 neighbouring tokens may lie apart. Units of a multiple of 16 tokens never
  // split a piece.
  bool Scattered() const { return units != nullptr && unit_tokens % kPieceTokens != 0; }
};

inline bool SamePlace(const SplitPlace& a, const SplitPlace& b) {
  return a.slot == b.slot && a.kv_head == b.kv_head && a.begin == b.begin && a.end == b.end &&
         a.units == b.units;
}

// The offset of a token's key, in elements from the cache's base, and the number of tokens, that
// one included, that lie one behind the other there.
struct Location {
  int64_t key;
  int64_t tokens;
};

inline Location Locate(const PagedCache& c, const SplitPlace& place, int64_t token) {
  int64_t tokens = c.block_tokens;
  if (place.units != nullptr && place.unit_tokens == 1) {
    token = place.units[token];
    tokens = 1;
  } else if (place.units != nullptr) {
    const int64_t in_unit = token % place.unit_tokens;
    token = place.units[token / place.unit_tokens] * place.unit_tokens + in_unit;
    tokens = place.unit_tokens - in_unit;
  }
  return {KeyIndex(c, place.slot, token, place.kv_head),
          Min(tokens, c.block_tokens - token % c.block_tokens)};
}

// One split of a tile and of the query heads [first_head, first_head + heads) of one KV head.
struct AttentionUnit {
  AttentionTile tile;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  int64_t split;
  // The fields of SplitPlace, where the unit is a part of a list.
  const int32_t* units = nullptr;
  int64_t unit_tokens = 1;
};

// Runs units in order. Each run knows the next unit, whose keys and values a core may ask for ahead
// of time.
template <class Core>
class UnitRunner {
 public:
  using S = typename Core::Vectors;

  explicit UnitRunner(const AttentionParams& p) : p_(p) {}

  void Add(const AttentionUnit& unit) {
    if (waiting_) Run(unit_, PlaceOf(unit));
    unit_ = unit;
    waiting_ = true;
  }

  void Finish() {
    if (waiting_) Run(unit_, SplitPlace());
    waiting_ = false;
  }

 private:
  SplitPlace PlaceOf(const AttentionUnit& u) const {
    const int64_t begin = u.split * kAttentionSplitTokens;
    return {p_.slots[u.tile.row],
            u.kv_head,
            begin,
            Min(begin + kAttentionSplitTokens, u.tile.tokens),
            u.units,
            u.unit_tokens};
  }

  void Run(const AttentionUnit& u, const SplitPlace& next) {
    const int64_t queries = u.tile.rows * u.heads;
    const bool partial = u.tile.partial >= 0;
    if (partial || u.split == 0) {
      for (int64_t q = 0; q < queries; ++q) {
        // A row by itself has the tile's tokens, which may be those of a list.
        s_.last_token[q] = u.tile.rows == 1 ? static_cast<int32_t>(u.tile.tokens - 1)
                                            : p_.positions[u.tile.row + q / u.heads];
        s_.state[q] = MergeState();
      }
      Core::LoadQueries(p_, u, s_);
    }
    Core::AttendSplit(p_.cache, PlaceOf(u), next, queries, s_);
    if (partial) {
      StorePartial(u, queries);
    } else {
      MergeSplit(u, queries);
    }
  }

  // Stores the results in the split's entries of `partial`: [heads][head_dim] outs, then [heads]
  // lse.
  void StorePartial(const AttentionUnit& u, int64_t queries) {
    const int64_t dim = p_.cache.head_dim;
    for (int64_t q = 0; q < queries; ++q) {
      const int64_t head = u.first_head + q % u.heads;
      const int64_t entry = u.tile.partial + q / u.heads * u.tile.splits + u.split;
      float* outs = p_.partial + entry * p_.heads * (dim + 1);
      outs[p_.heads * dim + head] = s_.lse[q];
      if (s_.lse[q] == kNegativeInfinity) continue;
      for (int64_t d = 0; d < dim; ++d) outs[head * dim + d] = s_.outs[q * dim + d];
    }
  }

  // Merges the results with those of the splits so far; the last split completes the result.
  void MergeSplit(const AttentionUnit& u, int64_t queries) {
    const int64_t dim = p_.cache.head_dim;
    const bool last = u.split + 1 == u.tile.splits;
    for (int64_t q = 0; q < queries; ++q) {
      MergePart<S>(s_.state[q], s_.merged + q * dim, s_.outs + q * dim, s_.lse[q], dim);
      if (!last) continue;
      const int64_t out = (u.tile.row + q / u.heads) * p_.heads + u.first_head + q % u.heads;
      FinishMerge<S>(s_.state[q], s_.merged + q * dim, dim, p_.out, p_.out_type, out * dim,
                     p_.lse != nullptr ? p_.lse + out : nullptr);
    }
  }

  const AttentionParams& p_;
  bool waiting_ = false;
  AttentionUnit unit_;
  typename Core::Scratch s_;
};

inline void ClearPaddedRows(const AttentionParams& p, Worker worker) {
  const int64_t width = int64_t{p.heads} * p.cache.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] >= 0) continue;
    for (int64_t i = 0; i < width; ++i) PutAs(p.out, p.out_type, r * width + i, 0);
    for (int64_t h = 0; p.lse != nullptr && h < p.heads; ++h) {
      p.lse[r * p.heads + h] = kNegativeInfinity;
    }
  }
}

// Adds the units of one tile whose work begins within `mine`; `cost` is the tile's own beginning.
template <class Core>
void AddTile(const AttentionParams& p, const GroupShape& group, const AttentionTile& tile,
             int64_t cost, Range mine, UnitRunner<Core>& runner) {
  const int64_t per_token = Core::CostPerToken(tile.rows * group.heads);
  for (int64_t part = 0; part < p.cache.kv_heads * group.parts; ++part) {
    const int64_t kv_head = part / group.parts;
    const int64_t offset = part % group.parts * group.heads;
    const int64_t start = cost + part * tile.tokens * per_token;
    AttentionUnit unit = {tile, kv_head, kv_head * group.group + offset,
                          Min(group.heads, group.group - offset), 0};
    for (; unit.split < tile.splits; ++unit.split) {
      const int64_t skipped = tile.partial < 0 ? 0 : unit.split * kAttentionSplitTokens * per_token;
      if (start + skipped >= mine.begin && start + skipped < mine.end) runner.Add(unit);
    }
  }
}

// Runs units in order, cut into shares of equal cost: a worker runs those whose cost begins in its
// share. Splits that merge on the way stay together.
template <class Core>
void Attention(const AttentionParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim || c.block_tokens % kPieceTokens != 0) {
    KernelCheckFailed("attention: head_dim a multiple of 16 up to 256, blocks of 16s of tokens");
  }
  ClearPaddedRows(p, worker);
  const GroupShape group = GroupShapeOf(p);
  const int64_t parts = c.kv_heads * group.parts;
  int64_t total = 0;
  AttentionTile tile;
  for (TileWalk walk(p, group.tile_rows); walk.Next(&tile);) {
    total += parts * tile.tokens * Core::CostPerToken(tile.rows * group.heads);
  }
  const Range mine = Share(total, worker);
  UnitRunner<Core> runner(p);
  int64_t cost = 0;
  for (TileWalk walk(p, group.tile_rows); cost < mine.end && walk.Next(&tile);) {
    const int64_t next = cost + parts * tile.tokens * Core::CostPerToken(tile.rows * group.heads);
    if (next > mine.begin) AddTile<Core>(p, group, tile, cost, mine, runner);
    cost = next;
  }
  runner.Finish();
}

template <class S>
void AttentionMerge(const AttentionParams& p, Worker worker) {
  const int64_t dim = p.cache.head_dim;
  const GroupShape group = GroupShapeOf(p);
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  AttentionTile tile;
  for (TileWalk walk(p, group.tile_rows); walk.Next(&tile);) {
    if (tile.partial < 0) continue;
    const int64_t begin = Max(mine.begin, tile.row * p.heads);
    const int64_t end = Min(mine.end, (tile.row + tile.rows) * p.heads);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / p.heads, head = item % p.heads;
      alignas(64) float merged[kMaxHeadDim];
      MergeState state;
      for (int64_t split = 0; split < tile.splits; ++split) {
        const int64_t entry = tile.partial + (row - tile.row) * tile.splits + split;
        const float* outs = p.partial + entry * p.heads * (dim + 1);
        MergePart<S>(state, merged, outs + head * dim, outs[p.heads * dim + head], dim);
      }
      FinishMerge<S>(state, merged, dim, p.out, p.out_type, item * dim,
                     p.lse != nullptr ? p.lse + item : nullptr);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
