// Addresses of a sequence's rows: the rows beside its cache (PagedRows), and the keys of a block
// of its cache. Copies write the page and block tables, so addresses may be computed before
// WaitForPriorKernels(). The data at those addresses may have been written by a kernel.
#pragma once

#include <cuda_bf16.h>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

// Returns the address of row `row` of (slot, head), whose elements are of type `T`.
template <typename T>
__device__ __forceinline__ T* RowAt(const PagedRows& r, int slot, int row, int head) {
  const int on_page = row / r.rows_per_page;
  const int64_t page = r.page_table[slot * r.table_stride + on_page];
  return reinterpret_cast<T*>(static_cast<char*>(r.base) + page * r.page_bytes +
                              head * r.head_bytes) +
         int64_t{row - on_page * r.rows_per_page} * r.dim;
}

// Returns the first key of a block. Its keys follow one another, head_dim elements apart.
template <typename T>
__device__ __forceinline__ const T* BlockKeys(const PagedCache& c, int slot, int block, int head) {
  const int entry = c.ring_blocks > 0 ? block % c.ring_blocks : block;
  return reinterpret_cast<const T*>(static_cast<const char*>(c.base) +
                                    HeadBlockOffset(c, slot, entry, head));
}

// Returns true if every row begins on a multiple of 16 bytes.
inline bool HasAlignedRows(const PagedRows& r) {
  return reinterpret_cast<uintptr_t>(r.base) % 16 == 0 && r.page_bytes % 16 == 0 &&
         r.head_bytes % 16 == 0 && r.dim * SizeOf(r.type) % 16 == 0;
}
inline bool HasAlignedKeys(const PagedCache& c) {
  return reinterpret_cast<uintptr_t>(c.base) % 16 == 0 && c.page_bytes % 16 == 0 &&
         c.head_dim * SizeOf(c.type) % 16 == 0;
}

}  // namespace sluice::kernels::cuda
