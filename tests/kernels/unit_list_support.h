// Caches and lists of units for the tests of attention over lists.
#pragma once

#include "kernels/kernel_cases.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {

// Random caches and lists of a case. Memory that no list names is NaN.
template <typename T>
class SparseFixture {
 public:
  SparseFixture(const SparseCase& c, Random& random) : case_(c) {
    const auto rows = static_cast<int64_t>(c.rows.size());
    int64_t slots = 0, tokens = 1;
    for (const SparseRow& row : c.rows) {
      slots = std::max(slots, int64_t{row.slot} + 1);
      tokens = std::max(tokens, int64_t{row.position} + 1);
      capacity_ = std::max(capacity_, UnitsOf(row));
    }
    const int64_t unit = c.unit_tokens, block = c.block_tokens;
    // A unit may take several blocks, or a part of one.
    stride_ = ((tokens + unit - 1) / unit * unit + block - 1) / block;
    ring_ = c.places == SparsePlaces::kRing ? static_cast<int32_t>(stride_ / 2) + 1 : 0;
    table_ = Guarded<int32_t>(slots * stride_);
    for (int64_t i = 0; i < slots * stride_; ++i) table_[i] = static_cast<int32_t>(i) + 1;
    std::shuffle(table_.begin(), table_.end(), random);
    page_elements_ = int64_t{c.kv_heads} * 2 * block * c.head_dim;
    arena_ = Guarded<T>((slots * stride_ + 2) * page_elements_);
    slots_ = Guarded<int32_t>(rows);
    positions_ = Guarded<int32_t>(rows);
    units_ = Guarded<int32_t>(rows * c.kv_heads * capacity_);
    places_ = Guarded<int32_t>(rows * c.kv_heads * capacity_);
    counts_ = Guarded<int32_t>(rows * c.kv_heads);
    for (int64_t r = 0; r < rows; ++r) {
      const SparseRow& row = c.rows[static_cast<size_t>(r)];
      slots_[r] = row.slot;
      positions_[r] = row.position;
      for (int64_t h = 0; h < c.kv_heads; ++h) MakeList(row, r * c.kv_heads + h, h, random);
    }
    q_ = NormalBuffer<float>(rows * q_stride_, random, 1.5f);
  }

  PagedCache Cache() {
    return {arena_.data(),
            table_.data(),
            stride_,
            page_elements_ * static_cast<int64_t>(sizeof(T)),
            case_.block_tokens,
            case_.kv_heads,
            case_.head_dim,
            case_.cache_type,
            ring_};
  }

  // Returns the params of rows [first, first + rows), with results elsewhere.
  SparseAttentionParams Params(int64_t first, int64_t rows, float* o, float* lse) {
    const int64_t lists = first * case_.kv_heads;
    return {.q = q_.data() + first * q_stride_,
            .q_stride = q_stride_,
            .slots = slots_.data() + first,
            .positions = positions_.data() + first,
            .cache = Cache(),
            .units = unnumbered() ? nullptr : units_.data() + lists * capacity_,
            .places =
                case_.places == SparsePlaces::kOther ? places_.data() + lists * capacity_ : nullptr,
            .counts = counts_.data() + lists,
            .o = o,
            .lse = lse,
            .capacity = static_cast<int32_t>(capacity_),
            .unit_tokens = case_.unit_tokens,
            .rows = static_cast<int32_t>(rows),
            .heads = case_.heads,
            .kv_head_begin = 0,
            .kv_head_end = case_.kv_heads,
            .scale = 1.0f / std::sqrt(static_cast<float>(case_.head_dim))};
  }

  int64_t rows() const { return static_cast<int64_t>(case_.rows.size()); }
  int64_t width() const { return int64_t{case_.heads} * case_.head_dim; }
  int64_t capacity() const { return capacity_; }
  Guarded<int32_t>& units() { return units_; }
  Guarded<int32_t>& places() { return places_; }
  Guarded<int32_t>& counts() { return counts_; }

 private:
  bool unnumbered() const { return case_.places == SparsePlaces::kUnnumbered; }
  int64_t AllUnits(const SparseRow& row) const { return row.position / case_.unit_tokens + 1; }
  int64_t UnitsOf(const SparseRow& row) const {
    return row.slot < 0 ? 0 : row.units < 0 ? AllUnits(row) : row.units;
  }

  // Draws units from the last half of a ring's sequence, else from all; the newest one always, if
  // there is any.
  void MakeList(const SparseRow& row, int64_t list, int64_t head, Random& random) {
    counts_[list] = static_cast<int32_t>(UnitsOf(row));
    if (row.slot < 0) return;
    std::vector<int32_t> units, places;
    const int64_t all = AllUnits(row);
    const int64_t first =
        ring_ > 0 ? std::max(int64_t{0}, all - ring_ * case_.block_tokens / case_.unit_tokens + 1)
                  : 0;
    for (int64_t u = first; u + 1 < all; ++u) units.push_back(static_cast<int32_t>(u));
    for (int64_t u = 0; u < stride_ * case_.block_tokens / case_.unit_tokens; ++u) {
      places.push_back(static_cast<int32_t>(u));
    }
    std::shuffle(units.begin(), units.end(), random);
    std::shuffle(places.begin(), places.end(), random);
    counts_[list] = std::min(counts_[list], static_cast<int32_t>(units.size()) + 1);
    const auto count = static_cast<size_t>(counts_[list]);
    if (count == 0) return;
    units.resize(count - 1);
    units.push_back(static_cast<int32_t>(all) - 1);
    std::sort(units.begin(), units.end());
    for (size_t i = 0; i < count; ++i) {
      const int64_t entry = list * capacity_ + static_cast<int64_t>(i);
      units_[entry] = unnumbered() ? static_cast<int32_t>(i) : units[i];
      places_[entry] = places[i];
      FillUnit(row, head, units_[entry],
               case_.places == SparsePlaces::kOther ? places[i] : units_[entry], random);
    }
  }

  void FillUnit(const SparseRow& row, int64_t head, int64_t unit, int64_t place, Random& random) {
    const auto dim = static_cast<size_t>(case_.head_dim);
    for (int64_t t = 0; t < case_.unit_tokens; ++t) {
      if (!unnumbered() && unit * case_.unit_tokens + t > row.position) return;
      T* key = arena_.data() + KeyIndex(Cache(), row.slot, place * case_.unit_tokens + t, head);
      T* value = key + int64_t{case_.block_tokens} * case_.head_dim;
      FillNormal(std::span<T>(key, dim), random);
      FillNormal(std::span<T>(value, dim), random);
    }
  }

  const SparseCase case_;
  int64_t capacity_ = 1;
  int64_t stride_ = 1;
  int32_t ring_ = 0;
  int64_t page_elements_ = 0;
  Guarded<T> arena_{0};
  Guarded<int32_t> table_{0}, slots_{0}, positions_{0}, units_{0}, places_{0}, counts_{0};
  const int64_t q_stride_ = int64_t{case_.heads + 2 * case_.kv_heads} * case_.head_dim;
  Guarded<float> q_{0};
};

// Calls `check` with a fixture of each case.
template <typename Check>
void ForEachSparseCase(const std::vector<SparseCase>& cases, Random& random, Check check) {
  for (const SparseCase& c : cases) {
    INFO(c.name);
    if (c.cache_type == DType::kFloat32) {
      SparseFixture<float> fixture(c, random);
      check(c, fixture);
    } else {
      SparseFixture<uint16_t> fixture(c, random);
      check(c, fixture);
    }
  }
}

}  // namespace sluice::kernels
