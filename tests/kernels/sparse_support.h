// Paged caches, rows and lists of units for the tests of sparse attention's operators.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {

inline const KernelTable& Reference() { return *FindKernelTable("reference"); }

template <typename T>
constexpr DType TypeOf() {
  return sizeof(T) == 4 ? DType::kFloat32 : sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat8E4M3;
}

// A page table [slots][stride] whose pages lie in any order, and `spare` pages that belong to no
// slot.
inline Guarded<int32_t> ShuffledPages(int32_t slots, int32_t stride, int32_t spare,
                                      Random& random) {
  std::vector<int32_t> pages(static_cast<size_t>(slots * stride + spare));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  Guarded<int32_t> table(int64_t{slots} * stride);
  std::copy_n(pages.begin(), table.size(), table.data());
  return table;
}

// The K and V of `slots` sequences of up to `blocks` blocks. They start as NaN.
template <typename T>
struct TestCache {
  TestCache(int32_t slots, int32_t blocks, int32_t block_tokens, int32_t kv_heads, int32_t head_dim,
            Random& random, int32_t ring_blocks = 0)
      : page_elements(int64_t{kv_heads} * 2 * block_tokens * head_dim),
        table(ShuffledPages(slots, blocks, 2, random)),
        data((int64_t{slots} * blocks + 2) * page_elements),
        view{data.data(),  table.data(), blocks,   page_elements * static_cast<int64_t>(sizeof(T)),
             block_tokens, kv_heads,     head_dim, TypeOf<T>(),
             ring_blocks} {}

  void Fill(Random& random, float scale = 1.0f) {
    FillNormal(std::span<T>(data.data(), static_cast<size_t>(data.size())), random, scale);
  }
  T* Key(int64_t slot, int64_t token, int64_t head) {
    return data.data() + KeyIndex(view, slot, token, head);
  }

  int64_t page_elements;
  Guarded<int32_t> table;
  Guarded<T> data;
  PagedCache view;
};

// Holds `rows` rows of `dim` elements for each slot and KV head, in pages with a gap between heads.
template <typename T>
struct TestRows {
  static constexpr int64_t kGap = 16;  // bytes

  TestRows(int32_t slots, int32_t rows, int32_t rows_per_page, int32_t dim, int32_t kv_heads,
           Random& random)
      : head_bytes(int64_t{rows_per_page} * dim * static_cast<int64_t>(sizeof(T)) + kGap),
        pages((rows + rows_per_page - 1) / rows_per_page),
        table(ShuffledPages(slots, pages, 1, random)),
        data((int64_t{slots} * pages + 1) * kv_heads * head_bytes /
             static_cast<int64_t>(sizeof(T))),
        view{data.data(), table.data(), pages,   kv_heads * head_bytes, head_bytes, rows_per_page,
             dim,         TypeOf<T>(),  kv_heads} {}

  // Returns the view for data of the same shape elsewhere.
  PagedRows At(Guarded<T>& other) const {
    PagedRows rows = view;
    rows.base = other.data();
    return rows;
  }
  T* Row(int64_t slot, int64_t row, int64_t head) {
    return data.data() + RowOffset(view, slot, row, head) / static_cast<int64_t>(sizeof(T));
  }

  int64_t head_bytes;
  int32_t pages;
  Guarded<int32_t> table;
  Guarded<T> data;
  PagedRows view;
};

// A list of units for each row and KV head. It starts as -1.
struct TestLists {
  TestLists(int64_t lists, int32_t capacity)
      : units(lists * capacity), counts(lists), view{units.data(), counts.data(), capacity} {}

  std::vector<int32_t> List(int64_t list) const {
    const int32_t* first = units.data() + list * view.capacity;
    return {first, first + counts[list]};
  }
  void Put(int64_t list, const std::vector<int32_t>& of_list) {
    std::copy(of_list.begin(), of_list.end(), units.data() + list * view.capacity);
    counts[list] = static_cast<int32_t>(of_list.size());
  }
  std::string Damage() const { return units.Damage() + counts.Damage(); }

  Guarded<int32_t> units;
  Guarded<int32_t> counts;
  UnitLists view;
};

template <typename T>
Guarded<T> CopyOf(const Guarded<T>& from) {
  Guarded<T> copy(from.size());
  std::copy_n(from.data(), from.size(), copy.data());
  return copy;
}

inline Guarded<int32_t> BufferOf(const std::vector<int32_t>& values) {
  Guarded<int32_t> buffer(static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), buffer.data());
  return buffer;
}

}  // namespace sluice::kernels
