// A part of a list that a puller was granted (kernels/pull_params.h): its units, and attention over
// them as a SparseAttention of one row and one KV head.
#pragma once

#include "kernels/list_parts.h"
#include "kernels/pull_params.h"

namespace sluice::kernels {

// Functions have internal linkage for the reason that scalar.h gives.
namespace {

// Entries [first, first + count) of a list.
struct PartUnits {
  int32_t first;
  int32_t count;
};

// Returns the units of a part. A part that the list does not have is empty.
constexpr PartUnits UnitsOfPart(const PullAttentionParams& p, int32_t list, int32_t part) {
  const int32_t counted = p.attention.counts[list];
  const int32_t most = counted < p.attention.capacity ? counted : p.attention.capacity;
  const int32_t listed = most > 0 ? most : 0;
  const int32_t units = UnitsOfPart(listed, p.least_units);
  const int64_t first = int64_t{part} * units;
  if (first >= listed) return {listed, 0};
  const int32_t left = listed - static_cast<int32_t>(first);
  return {static_cast<int32_t>(first), left < units ? left : units};
}

// Returns the index of a part's results in part_lse; that in part_o is head_dim times as large.
constexpr int64_t PartItem(const PullAttentionParams& p, int32_t list, int32_t part) {
  const int32_t group = p.attention.heads / p.attention.cache.kv_heads;
  return (int64_t{list} * p.most_parts + part) * group;
}

// Returns the SparseAttention that computes a part and writes its results. `units` are the part's;
// the result points to its count.
constexpr SparseAttentionParams AttentionOfPart(const PullAttentionParams& p, int32_t list,
                                                int32_t part, const PartUnits& units) {
  SparseAttentionParams a = p.attention;
  PagedCache& c = a.cache;
  const int64_t row = list / c.kv_heads, kv_head = list % c.kv_heads;
  const int64_t group = a.heads / c.kv_heads, item = PartItem(p, list, part);
  a.q += row * a.q_stride + kv_head * group * c.head_dim;
  a.slots += row;
  a.positions += row;
  a.units += int64_t{list} * a.capacity + units.first;
  a.places = nullptr;
  a.counts = &units.count;
  a.o = p.part_o + item * c.head_dim;
  a.lse = p.part_lse + item;
  a.capacity = units.count;
  a.rows = 1;
  a.heads = static_cast<int32_t>(group);
  a.kv_head_begin = 0;
  a.kv_head_end = 1;
  a.wanted = nullptr;
  if (c.head_tables != nullptr) {
    c.head_tables += kv_head;
  } else {
    c.base = static_cast<char*>(c.base) +
             kv_head * 2 * c.block_tokens * c.head_dim * static_cast<int64_t>(SizeOf(c.type));
  }
  c.kv_heads = 1;
  return a;
}

}  // namespace
}  // namespace sluice::kernels
