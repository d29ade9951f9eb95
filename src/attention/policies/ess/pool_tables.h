// The device's view of each slot's pages under policy ess. It holds, in fixed tables by slot, the
// page numbers of the home, of the places, of the index keys and of the residency tables, and the
// constants that a fresh residency table is filled with. Only the engine's thread calls it.
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

  // RESOURCE_EXHAUSTED: there is no memory for the tables.
  static absl::StatusOr<PoolTables> Create(Device* device, PagePool* hbm, PagePool* dram, int slots,
                                           const EssPoolShape& shape);

  // Writes the host's tables of a slot, marks its pools as not whole, and appends to `ops` the
  // copies that send both to the device.
  void Publish(int slot, const SequenceCache& home, const SequenceCache& hbm,
               const PoolPages& pages, Ops* ops) const;
  // Appends the copies that make the slot's residency tables those of an empty pool. All copies in
  // `first` must be done before those in `then` start.
  void Clear(const PoolPages& pages, Ops* first, Ops* then) const;
  // Appends the copies that give position i place i for every i < tokens, give the next position
  // place `tokens`, and mark the slot's pools as whole. REQUIRES: each pool has more than `tokens`
  // places.
  void FillWhole(int slot, const PoolPages& pages, int64_t tokens, Ops* ops) const;

  // Each function returns where a layer's page numbers begin in slot 0's row of a table.
  const int32_t* home_table(int layer) const;
  const int32_t* pool_table(int layer) const { return at(layer, 0); }
  const int32_t* index_table(int layer) const { return at(layer, place_blocks_); }
  kernels::ResidencyTable Residency(int layer) const;
  // UpdateResidencyParams::whole.
  const int32_t* whole() const { return whole_.as<int32_t>(); }
  int64_t home_stride() const { return layers_ * home_blocks_; }
  int64_t stride() const { return layers_ * entries_; }

  // Returns the index, among a layer's residency pages, of the word where a row of a table begins.
  static int64_t PlaceOfWord(int64_t unit) { return unit; }
  int64_t PlacesWord(int64_t total, int64_t place) const {
    return shape_.PlaceOfPages(total) * kResidencyWords + place * kPlaceWords;
  }

 private:
  const int32_t* at(int layer, int64_t entry) const {
    return device_table_.as<int32_t>() + layer * entries_ + entry;
  }
  // Appends copies of `count` words from `source` to a layer's residency pages, from word `word`
  // on. With `repeat`, every run of pages gets the same words, of which `source` has kRepeated.
  void CopyWords(absl::Span<const int32_t> pages, int64_t word, int64_t count,
                 const int32_t* source, bool repeat, Ops* ops) const;
  static constexpr int64_t kRepeated = 64 * kResidencyWords;

  EssPoolShape shape_;
  PagePool* hbm_ = nullptr;
  int layers_ = 0;
  int64_t home_blocks_ = 0, place_blocks_ = 0, index_blocks_ = 0, place_of_pages_ = 0,
          places_pages_ = 0;
  int64_t entries_ = 0;                         // Page numbers of one layer in a slot's row.
  Buffer device_table_, host_table_;            // int32 [slots][layers][entries_]
  Buffer device_home_table_, host_home_table_;  // int32 [slots][layers][home_blocks_]
  Buffer whole_;                                // int32 [slots], on the device.
  Buffer constants_;                            // On the device; the pointers below point into it.
  const int32_t* none_ = nullptr;               // [kRepeated] of -1
  const int32_t* no_places_ = nullptr;          // [kResidencyWords][2] of (kNoPlace, -1)
  const int32_t* index_ = nullptr;              // [max_context + 1]: 0, 1, ...
  const int32_t* index_rows_ = nullptr;         // [max_context + 1][2] of (i, i)
};

}  // namespace sluice
