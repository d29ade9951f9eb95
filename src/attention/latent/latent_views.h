// The caches of a model with latent attention, as operators see them: one kind's pages of a pool,
// through a table of page numbers. Every layout of such a model has the kinds in this order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/latent_params.h"
#include "src/kv/page_pool.h"

namespace sluice {

inline constexpr size_t kLatentKind = 0;
inline constexpr size_t kIndexKind = 1;  // Absent if the model has no indexer.

inline bool HasLatents(const CacheLayout& layout) {
  return layout.FindKind("latent") == static_cast<int>(kLatentKind);
}
inline bool HasIndexKeys(const CacheLayout& layout) {
  return layout.FindKind("index") == static_cast<int>(kIndexKind);
}

// Returns a layer's latent entries for operators. `table` is [slots][table_stride] page numbers of
// the layer, and `rank` the number of latent values of an entry.
inline kernels::PagedLatents LatentsIn(const PagePool& pool, const int32_t* table,
                                       int64_t table_stride, int32_t rank) {
  const CacheKind& kind = pool.layout().kinds[kLatentKind];
  kernels::PagedLatents out{};
  out.base = pool.base(kLatentKind);
  out.block_table = table;
  out.table_stride = table_stride;
  out.page_bytes = kind.page_bytes();
  out.block_tokens = kind.block_tokens;
  out.rank = rank;
  out.rope = kind.element_type == DType::kFloat8E4M3
                 ? kernels::kPackedRope
                 : static_cast<int32_t>(kind.bytes_per_token / SizeOf(kind.element_type)) - rank;
  out.type = kind.element_type;
  return out;
}

inline kernels::PagedIndexKeys IndexKeysIn(const PagePool& pool, const int32_t* table,
                                           int64_t table_stride) {
  const CacheKind& kind = pool.layout().kinds[kIndexKind];
  return {pool.base(kIndexKind), table, table_stride, kind.page_bytes(), kind.block_tokens,
          kind.element_type};
}

}  // namespace sluice
