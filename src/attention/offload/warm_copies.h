// The copies that make a sequence's working set: from its host cache to the places in HBM, and to
// the tables that say what lies there. They are only copies, so that a copy stream does them beside
// any step.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/offload/offload_pages.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

// Values that tables are copied from, in pinned memory; read only.
class WarmConstants {
 public:
  static absl::StatusOr<WarmConstants> Create(const OffloadPages& pages, Device* device);
  // int32 [0, place_units): i
  const int32_t* index() const { return buffer_.as<int32_t>(); }
  // {i, 0}, i < units of the longest sequence: rows of ResidencyTable::places
  const int32_t* unit_rows() const { return index() + places_; }
  // One page's worth of rows each: -1; {-1, 0}; {kNoPlace, 0}
  const int32_t* none() const { return unit_rows() + 2 * units_; }
  const int32_t* free_rows() const { return none() + per_page_; }
  const int32_t* no_place_rows() const { return free_rows() + 2 * per_page_; }
  // A head's part of a page.
  const int32_t* zeros() const { return no_place_rows() + 2 * per_page_; }

 private:
  int64_t places_ = 0, units_ = 0, per_page_ = 0;
  Buffer buffer_;
};

// The copies of one sequence. `home` and `table` (OffloadPages' row of page numbers) are host
// memory.
struct WarmCopies {
  const OffloadPages& pages;
  const WarmConstants& constants;
  const PagePool& dram;
  const PagePool& hbm;
  const SequenceCache& home;
  const int32_t* table;
  int64_t total;   // the sequence's length at its end
  int64_t tokens;  // tokens whose caches are in the host cache

  // Adds the copies after which HBM is as the row of position `tokens` expects it. All copies of
  // `first` must be done before those of `then` begin; inside each there is no order. `units` is as
  // for OffloadTier::WarmUp.
  void Make(const std::vector<std::vector<int32_t>>& units, std::vector<Stream::CopyOp>* first,
            std::vector<Stream::CopyOp>* then) const;

 private:
  using Ops = std::vector<Stream::CopyOp>;
  // Copies `count` rows from `values` to an array whose pages begin at `entry`; with `repeat`, the
  // same rows to each page.
  void CopyRows(const ArrayPages::Rows& rows, int64_t entry, int head, int64_t row, int64_t count,
                const int32_t* values, bool repeat, Ops* ops) const;
  void CopyDense(int layer, Ops* ops) const;
  void ClearTables(int layer, int head, Ops* ops) const;
  // Copies tokens [from, from + count) of the host cache to the tokens of places that begin at
  // `to`.
  void CopyTokens(int layer, int head, int64_t from, int64_t to, int64_t count, Ops* ops) const;
  void CopyRing(int layer, int head, Ops* ops) const;
  void CopyUnits(int layer, int head, const std::vector<int32_t>& units, Ops* first,
                 Ops* then) const;
  void CopyPersistent(int layer, int head, Ops* ops) const;
  // Returns where a block of a head's places lies in HBM.
  uint8_t* PlaceBlock(int layer, int head, int64_t block) const;
};

}  // namespace sluice
