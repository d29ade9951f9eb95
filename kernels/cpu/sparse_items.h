// Sparse attention as items of attention: a list of units is a sequence of tokens of its own, cut
// into splits like any other, and goes through the same cores.
//
// An item is the list of a (row, KV head) and a part of the head's query heads. A worker runs whole
// items, whose splits merge on the way. The next item is always known, and its data is asked for
// ahead of time, across all the items of one call.
#pragma once

#include "kernels/cpu/attention_items.h"
#include "kernels/unit_list.h"

namespace sluice::kernels::cpu {
namespace {

// Attention's params over the same rows, without lists.
inline AttentionParams RowsOf(const SparseAttentionParams& p) {
  return {.q = p.q,
          .q_stride = p.q_stride,
          .slots = p.slots,
          .positions = p.positions,
          .cache = p.cache,
          .out = p.o,
          .lse = p.lse,
          .partial = nullptr,
          .partial_rows = 0,
          .rows = p.rows,
          .decode_rows = p.rows,
          .heads = p.heads,
          .scale = p.scale,
          .out_type = DType::kFloat32};
}

inline void ClearHeads(const SparseAttentionParams& p, int64_t row, int64_t first_head,
                       int64_t heads) {
  const int64_t begin = row * p.heads + first_head;
  for (int64_t i = begin; i < begin + heads; ++i) p.lse[i] = kNegativeInfinity;
  for (int64_t i = begin * p.cache.head_dim; i < (begin + heads) * p.cache.head_dim; ++i)
    p.o[i] = 0;
}

// Runs items in order, cut into shares of equal cost: a worker runs those whose cost begins in its
// share.
template <class Core>
void SparseAttention(const SparseAttentionParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim || c.block_tokens % kPieceTokens != 0) {
    KernelCheckFailed(
        "sparse_attention: head_dim a multiple of 16 up to 256, blocks of 16s of tokens");
  }
  const AttentionParams rows = RowsOf(p);
  const GroupShape group = GroupShapeOf(rows);
  // An empty list costs something, so that it is in some worker's share.
  const auto cost_of = [&](const UnitList& list) {
    return list.tokens * Core::CostPerToken(group.heads) + 1;
  };
  const auto wanted = [&](int64_t row, int64_t head) {
    return p.wanted == nullptr || p.wanted[row * c.kv_heads + head] != 0;
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t h = p.kv_head_begin; h < p.kv_head_end; ++h) {
      if (!wanted(r, h)) continue;
      total += cost_of(UnitListOf(p, r, h)) * group.parts;
    }
  }
  const Range mine = Share(total, worker);
  UnitRunner<Core> runner(rows);
  int64_t cost = 0;
  for (int64_t r = 0; r < p.rows && cost < mine.end; ++r) {
    for (int64_t h = p.kv_head_begin; h < p.kv_head_end; ++h) {
      if (!wanted(r, h)) continue;
      const UnitList list = UnitListOf(p, r, h);
      for (int64_t part = 0; part < group.parts; ++part) {
        const int64_t start = cost;
        cost += cost_of(list);
        if (start < mine.begin || start >= mine.end) continue;
        const int64_t offset = part * group.heads;
        const int64_t first_head = h * group.group + offset;
        const int64_t heads = Min(group.heads, group.group - offset);
        if (list.tokens == 0) ClearHeads(p, r, first_head, heads);
        const AttentionTile tile = {r, 1, list.tokens, CeilDiv(list.tokens, kAttentionSplitTokens),
                                    -1};
        for (int64_t split = 0; split < tile.splits; ++split) {
          runner.Add({tile, h, first_head, heads, split, list.places, list.unit_tokens});
        }
      }
    }
  }
  runner.Finish();
}

}  // namespace
}  // namespace sluice::kernels::cpu
