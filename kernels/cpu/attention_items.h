// Attention's work items, for any way to attend to one split (`Core`):
//   Vectors                 the path's vectors (simd_math.h)
//   Scratch                 a worker's working memory, derived from ItemScratch; on its stack
//   CostPerToken(queries)   work per token of context of a tile with so many queries
//   LoadQueries(p, item, s) the item's queries, scaled, in the core's own form
//   AttendSplit(cache, slot, kv_head, queries, split, tokens, s)
//                           s.outs and s.lse of every query over one split of a context of `tokens`
// A core gives a query one fixed sequence of operations, whatever its neighbours in the tile are.
#pragma once

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kPieceTokens = 16;  // never crosses a block: blocks are multiples of 16 tokens

// What items need of a worker's memory. Query q of a tile is row q / heads, head q % heads.
struct ItemScratch {
  alignas(64) float outs[kMaxQueries * kMaxHeadDim];    // of the split, [queries][head_dim]
  alignas(64) float merged[kMaxQueries * kMaxHeadDim];  // of the splits so far
  float lse[kMaxQueries];
  int32_t last_token[kMaxQueries];  // position of the query's row
  MergeState state[kMaxQueries];
};

// A tile and the query heads [first_head, first_head + heads) of one kv head.
struct AttentionItem {
  AttentionTile tile;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
};

template <class Core>
void LoadItem(const AttentionParams& p, const AttentionItem& item, typename Core::Scratch& s) {
  Core::LoadQueries(p, item, s);
  for (int64_t q = 0; q < item.tile.rows * item.heads; ++q) {
    s.last_token[q] = p.positions[item.tile.row + q / item.heads];
  }
}

// One split of an item, into its entries of `partial`: [heads][head_dim] outs, then [heads] lse.
template <class Core>
void RunPartialItem(const AttentionParams& p, const AttentionItem& item, int64_t split,
                    typename Core::Scratch& s) {
  const int64_t dim = p.cache.head_dim;
  const int64_t queries = item.tile.rows * item.heads;
  LoadItem<Core>(p, item, s);
  Core::AttendSplit(p.cache, p.slots[item.tile.row], item.kv_head, queries, split, item.tile.tokens,
                    s);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t head = item.first_head + q % item.heads;
    const int64_t entry = item.tile.partial + q / item.heads * item.tile.splits + split;
    float* outs = p.partial + entry * p.heads * (dim + 1);
    outs[p.heads * dim + head] = s.lse[q];
    if (s.lse[q] == kNegativeInfinity) continue;
    for (int64_t d = 0; d < dim; ++d) outs[head * dim + d] = s.outs[q * dim + d];
  }
}

// Every split of an item, merged on the way.
template <class Core>
void RunWholeItem(const AttentionParams& p, const AttentionItem& item, typename Core::Scratch& s) {
  using S = typename Core::Vectors;
  const int64_t dim = p.cache.head_dim;
  const int64_t queries = item.tile.rows * item.heads;
  LoadItem<Core>(p, item, s);
  for (int64_t q = 0; q < queries; ++q) s.state[q] = MergeState();
  for (int64_t split = 0; split < item.tile.splits; ++split) {
    Core::AttendSplit(p.cache, p.slots[item.tile.row], item.kv_head, queries, split,
                      item.tile.tokens, s);
    for (int64_t q = 0; q < queries; ++q) {
      MergePart<S>(s.state[q], s.merged + q * dim, s.outs + q * dim, s.lse[q], dim);
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t out =
        (item.tile.row + q / item.heads) * p.heads + item.first_head + q % item.heads;
    FinishMerge<S>(s.state[q], s.merged + q * dim, dim, p.out, p.out_type, out * dim,
                   p.lse != nullptr ? p.lse + out : nullptr);
  }
}

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

// Runs the items of one tile whose cost begins within `mine`; `cost` is the tile's own beginning.
template <class Core>
void RunTile(const AttentionParams& p, const GroupShape& group, const AttentionTile& tile,
             int64_t cost, Range mine, typename Core::Scratch& s) {
  const int64_t per_token = Core::CostPerToken(tile.rows * group.heads);
  for (int64_t part = 0; part < p.cache.kv_heads * group.parts; ++part) {
    const int64_t kv_head = part / group.parts;
    const int64_t offset = part % group.parts * group.heads;
    const AttentionItem item = {tile, kv_head, kv_head * group.group + offset,
                                Min(group.heads, group.group - offset)};
    const int64_t start = cost + part * tile.tokens * per_token;
    if (tile.partial < 0) {
      if (start >= mine.begin && start < mine.end) RunWholeItem<Core>(p, item, s);
      continue;
    }
    for (int64_t split = 0; split < tile.splits; ++split) {
      const int64_t split_start = start + split * kAttentionSplitTokens * per_token;
      if (split_start >= mine.begin && split_start < mine.end) {
        RunPartialItem<Core>(p, item, split, s);
      }
    }
  }
}

// Items in order, cut into shares of equal cost: a worker runs those whose cost begins in its
// share.
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
  typename Core::Scratch scratch;
  int64_t cost = 0;
  for (TileWalk walk(p, group.tile_rows); cost < mine.end && walk.Next(&tile);) {
    const int64_t next = cost + parts * tile.tokens * Core::CostPerToken(tile.rows * group.heads);
    if (next > mine.begin) RunTile<Core>(p, group, tile, cost, mine, scratch);
    cost = next;
  }
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
