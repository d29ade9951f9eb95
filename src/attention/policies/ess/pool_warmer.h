// Moves what a warm-up brings to the pools, of all layers at once, beside the steps: lists are made
// on the host, sent in one copy, and followed by one Transfer of entries, never a copy for each.
//
// Lists take milliseconds to tens of them, so a thread of its own makes them: the engine's thread
// hands a warm-up over and goes on with its steps. All functions are for the engine's thread. On a
// device without threads the lists are made in Start.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "src/attention/policies/ess/pool_pages.h"
#include "src/attention/policies/ess/pool_tables.h"
#include "src/attention/policies/ess/warm_plan.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/selection_hints.h"
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
                                                            PagePool* dram, int slots,
                                                            int64_t most_places);
  // Ends what was started.
  ~PoolWarmer();

  struct Sequence {
    const SequenceCache* home = nullptr;
    const PoolPages* pool = nullptr;
    int64_t place_of_pages = 0;
  };
  struct WarmUp {
    Sequence sequence;   // its pages stay as they are until Done
    int64_t tokens = 0;  // cached
    SelectionHints hints;
    bool fill = false;        // else the pool stays empty
    Event* before = nullptr;  // the residency tables are those of an empty pool then
  };
  // Starts to bring the entries that hints and tokens give (WarmPlan) to the first places and,
  // after them, the place of position `tokens`, which has no entry yet. REQUIRES: Done(slot).
  void Start(int slot, WarmUp warm_up);
  // Whether all of it is there.
  bool Done(int slot) const { return slots_[static_cast<size_t>(slot)].Ready(); }
  Event& DoneEvent(int slot) { return slots_[static_cast<size_t>(slot)]; }
  // A new sequence moves into the slot.
  void Join(int slot) { slots_[static_cast<size_t>(slot)].status = absl::OkStatus(); }
  // INTERNAL, reason TRANSFER_FAILED: the slot's warm-up failed; its pool is empty, and who was
  // promised more may not go on. REQUIRES: Done(slot).
  const absl::Status& Health(int slot) const { return slots_[static_cast<size_t>(slot)].status; }

 private:
  // Lists of all layers, one after the other: each is int32 [layers][capacity].
  struct Lists {
    int32_t *sources, *targets;  // entries: of the home, of the pool
    int32_t *place_of, *places;  // rows of the tables
    int32_t* rows;               // [..][2]: what the latter get
    int32_t* counts;             // [layers]
    int64_t capacity = 0;
    int64_t words = 0;  // of all of them
  };
  struct Staging {
    Buffer host;
    Buffer device;
    std::unique_ptr<Event> done;
  };
  // One is filled while the other is on its way.
  static constexpr size_t kStagings = 2;

  // What a warm-up has come to. `status` is the thread's until `enqueued` is set again.
  struct Slot : public Event {
    bool Ready() const override {
      return enqueued.load(std::memory_order_acquire) && moved->Ready();
    }
    void Wait() const override {
      enqueued.wait(false, std::memory_order_acquire);
      moved->Wait();
    }
    std::atomic<bool> enqueued{true};
    std::unique_ptr<Event> moved;
    absl::Status status;
  };
  struct Job {
    int slot = 0;
    WarmUp warm_up;
  };

  PoolWarmer(Device* device, PagePool* hbm, PagePool* dram, int slots, int64_t capacity);
  Lists ListsAt(const Buffer& buffer, int64_t capacity) const;
  void Write(const WarmUp& warm_up, WarmPlan* plan, const Lists& lists) const;
  // Makes and sends the lists, and enqueues what moves.
  void Run(Job job);
  void Loop();

  Device* const device_;
  PagePool* const hbm_;
  PagePool* const dram_;
  const int layers_;
  const int64_t capacity_;  // entries of a layer, the next token's included
  std::deque<Slot> slots_;
  // Of whoever runs jobs.
  std::array<Staging, kStagings> stagings_;
  size_t next_ = 0;
  Buffer index_;                    // int32 [capacity]: 0, 1, ...
  std::unique_ptr<Stream> stream_;  // its thread ends before what is above goes

  absl::Mutex mutex_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // not joinable on a device without threads
};

}  // namespace sluice
