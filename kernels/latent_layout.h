// Offsets in a latent cache and in an index cache. Internal linkage, as in scalar.h.
#pragma once

#include "kernels/latent_params.h"
#include "kernels/scalar.h"

namespace sluice::kernels {
namespace {

// Byte offsets behind the 512 values of a packed entry.
constexpr int64_t kPackedScalesAt = kPackedRank;
constexpr int64_t kPackedRopeAt = kPackedScalesAt + kPackedRank / kPackedScaleTokens * 4;

// Returns the entry's number among those of all pages: page * block_tokens + entry % block_tokens.
constexpr int64_t EntryIndex(const PagedLatents& c, int64_t slot, int64_t entry) {
  const int64_t page = c.block_table[slot * c.table_stride + entry / c.block_tokens];
  return page * c.block_tokens + entry % c.block_tokens;
}

// Returns the byte offset of an entry from `base`.
constexpr int64_t EntryOffset(const PagedLatents& c, int64_t slot, int64_t entry) {
  const int64_t page = c.block_table[slot * c.table_stride + entry / c.block_tokens];
  return page * c.page_bytes + entry % c.block_tokens * EntryBytes(c.type, c.rank, c.rope);
}

// Returns the byte offset of the elements of a token's index key from `base`.
constexpr int64_t IndexKeyOffset(const PagedIndexKeys& c, int64_t slot, int64_t token) {
  const int64_t page = c.block_table[slot * c.table_stride + token / c.block_tokens];
  return page * c.page_bytes + token % c.block_tokens * kIndexDim * SizeOf(c.type);
}

// Returns the byte offset of the key's scale from `base`, in the packed form.
constexpr int64_t IndexScaleOffset(const PagedIndexKeys& c, int64_t slot, int64_t token) {
  const int64_t page = c.block_table[slot * c.table_stride + token / c.block_tokens];
  return page * c.page_bytes + int64_t{c.block_tokens} * kIndexDim + token % c.block_tokens * 4;
}

// Returns row `row` of an int32 table (ResidencyTable) of one head.
inline int32_t* TableRow(const PagedRows& rows, int64_t slot, int64_t row) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(rows.base) + RowOffset(rows, slot, row, 0));
}

}  // namespace
}  // namespace sluice::kernels
