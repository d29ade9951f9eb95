// What the device knows of the pages of each slot under policy ess: page numbers of home, places,
// index keys and residency tables, in fixed tables by slot, and what the residency tables begin
// with. Engine's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/sparse_params.h"
#include "src/attention/policies/ess/pool_pages.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class PoolTables {
 public:
  using Ops = std::vector<Stream::CopyOp>;

  // RESOURCE_EXHAUSTED: no memory for them.
  static absl::StatusOr<PoolTables> Create(Device* device, PagePool* hbm, PagePool* dram, int slots,
                                           const EssPoolShape& shape);

  // Writes the host's tables of a slot, whose pools are not whole yet, and adds the copies that
  // send them.
  void Publish(int slot, const SequenceCache& home, const SequenceCache& hbm,
               const PoolPages& pages, Ops* ops) const;
  // Adds the copies that make the slot's residency tables those of an empty pool: `first`, then
  // `then`.
  void Clear(const PoolPages& pages, Ops* first, Ops* then) const;
  // Adds the copies that make entry `i` of each pool position i, for i < tokens, and place `tokens`
  // the next position's, and say that the slot's pools are whole. REQUIRES: so many places.
  void FillWhole(int slot, const PoolPages& pages, int64_t tokens, Ops* ops) const;

  // Rows of pages of a slot's HBM tables begin there, in each layer's part.
  const int32_t* home_table(int layer) const;
  const int32_t* pool_table(int layer) const { return at(layer, 0); }
  const int32_t* index_table(int layer) const { return at(layer, place_blocks_); }
  kernels::ResidencyTable Residency(int layer) const;
  // UpdateResidencyParams::whole.
  const int32_t* whole() const { return whole_.as<int32_t>(); }
  int64_t home_stride() const { return layers_ * home_blocks_; }
  int64_t stride() const { return layers_ * entries_; }

  // Where the page that has row `row` of a table lies among the residency pages of a layer.
  static int64_t PlaceOfWord(int64_t unit) { return unit; }
  int64_t PlacesWord(int64_t total, int64_t place) const {
    return shape_.PlaceOfPages(total) * kResidencyWords + place * kPlaceWords;
  }

 private:
  const int32_t* at(int layer, int64_t entry) const {
    return device_table_.as<int32_t>() + layer * entries_ + entry;
  }
  // Copies of `count` words from `source` to the words from `word` on of a layer's residency pages;
  // `step` 0: each run of pages gets the same words, of which there are kRepeated.
  void CopyWords(absl::Span<const int32_t> pages, int64_t word, int64_t count,
                 const int32_t* source, bool repeat, Ops* ops) const;
  static constexpr int64_t kRepeated = 64 * kResidencyWords;

  EssPoolShape shape_;
  PagePool* hbm_ = nullptr;
  int layers_ = 0;
  int64_t home_blocks_ = 0, place_blocks_ = 0, index_blocks_ = 0, place_of_pages_ = 0,
          places_pages_ = 0;
  int64_t entries_ = 0;                         // of a layer in a slot's row
  Buffer device_table_, host_table_;            // int32 [slots][layers][entries_]
  Buffer device_home_table_, host_home_table_;  // int32 [slots][layers][home_blocks_]
  Buffer whole_;                                // int32 [slots], of the device
  Buffer constants_;                            // of the device: below
  const int32_t* none_ = nullptr;               // [kRepeated] of -1
  const int32_t* no_places_ = nullptr;          // [kResidencyWords][2] of (kNoPlace, -1)
  const int32_t* index_ = nullptr;              // [max_context + 1]: 0, 1, ...
  const int32_t* index_rows_ = nullptr;         // [max_context + 1][2] of (i, i)
};

}  // namespace sluice
