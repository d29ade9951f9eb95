// Moves what a warm-up brings to the pools, of all layers at once, beside the steps: lists are made
// on the host, sent in one copy, and followed by one Transfer of entries, never a copy for each.
// Engine's thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/policies/ess/pool_tables.h"
#include "src/attention/policies/ess/warm_plan.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class PoolWarmer {
 public:
  // Entries of a layer that a warm-up brings at most: 16,384 rows of 656 bytes are 14 ms of a link
  // of 45 GB/s for 61 layers. A larger pool is filled by the steps.
  static constexpr int64_t kMostEntries = 16384;
  // Multiprocessors that it takes from the steps beside it.
  static constexpr int32_t kWorkers = 16;

  // `most_places` of a sequence. RESOURCE_EXHAUSTED: no memory for the lists.
  static absl::StatusOr<std::unique_ptr<PoolWarmer>> Create(Device* device, PagePool* hbm,
                                                            PagePool* dram, int64_t most_places);
  ~PoolWarmer();

  struct Sequence {
    const SequenceCache* home = nullptr;
    const SequenceCache* hbm = nullptr;
    int64_t places = 0;
    int64_t place_of_pages = 0;
  };
  // Enqueues, after `before`: the entries that `plan` names (null: none) to the first places, and
  // after them the place of position `tokens`, which has no entry yet. The residency tables are
  // those of an empty pool. Records `done`.
  void Start(const Sequence& sequence, int64_t tokens, WarmPlan* plan, Event& before, Event& done);

 private:
  // Lists of all layers, one after the other: each is int32 [layers][capacity].
  struct Lists {
    int32_t *sources, *targets;  // entries: of the home, of the pool
    int32_t *place_of, *places;  // rows of the tables
    int32_t* rows;               // [..][2]: what the latter get
    int32_t* counts;             // [layers]
  };
  struct Staging {
    Buffer host;
    Buffer device;
    std::unique_ptr<Event> done;
  };
  // A warm-up waits for the last but so many.
  static constexpr size_t kStagings = 4;

  PoolWarmer(Device* device, PagePool* hbm, PagePool* dram, int64_t capacity);
  int64_t words() const { return layers_ * (6 * capacity_ + 1); }
  Lists ListsAt(const Buffer& buffer) const;
  void Write(const Sequence& sequence, int64_t tokens, WarmPlan* plan, const Lists& lists) const;

  Device* const device_;
  PagePool* const hbm_;
  PagePool* const dram_;
  const int layers_;
  const int64_t capacity_;
  std::array<Staging, kStagings> stagings_;
  size_t next_ = 0;
  Buffer index_;                    // int32 [capacity]: 0, 1, ...
  std::unique_ptr<Stream> stream_;  // last: its thread ends first
};

}  // namespace sluice
