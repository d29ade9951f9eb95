// Fills the pools of all layers for a warm-up, beside the steps. The lists of entries are made on
// the host, sent to the device in one copy, and followed by one Transfer of the entries; no entry
// is copied by itself.
//
// Making the lists takes milliseconds to tens of milliseconds, so a thread of its own makes them:
// the engine's thread hands a warm-up over and goes on with its steps. All functions are for the
// engine's thread. On a device without threads, Start makes the lists.
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
  // Most entries of a layer that a warm-up fetches: 16,384 rows of 656 bytes for 61 layers take 14
  // ms of a link of 45 GB/s. The steps fill the rest of a larger pool.
  static constexpr int64_t kMostEntries = 16384;
  // Multiprocessors that a warm-up takes from the steps beside it.
  static constexpr int32_t kWorkers = 16;

  // `most_places` is the most places of a sequence in a layer. RESOURCE_EXHAUSTED: there is no
  // memory for the lists.
  static absl::StatusOr<std::unique_ptr<PoolWarmer>> Create(Device* device, PagePool* hbm,
                                                            PagePool* dram, int slots,
                                                            int64_t most_places);
  // Completes what was started.
  ~PoolWarmer();

  struct Sequence {
    const SequenceCache* home = nullptr;
    const PoolPages* pool = nullptr;
    int64_t place_of_pages = 0;
  };
  struct WarmUp {
    Sequence sequence;   // Its pages stay as they are until Done.
    int64_t tokens = 0;  // Tokens that are cached.
    SelectionHints hints;
    bool fill = false;        // False: the pool stays empty.
    Event* before = nullptr;  // When it is ready, the residency tables are those of an empty pool.
  };
  // Starts to fetch the entries that hints and tokens give (WarmPlan) into the first places, and to
  // reserve the place after them for position `tokens`, which has no entry yet. REQUIRES:
  // Done(slot).
  void Start(int slot, WarmUp warm_up);
  // Returns whether everything that Start enqueued for the slot is done.
  bool Done(int slot) const { return slots_[static_cast<size_t>(slot)].Ready(); }
  Event& DoneEvent(int slot) { return slots_[static_cast<size_t>(slot)]; }
  // Must be called when a new sequence moves into the slot.
  void Join(int slot) { slots_[static_cast<size_t>(slot)].status = absl::OkStatus(); }
  // INTERNAL, reason TRANSFER_FAILED: the slot's warm-up failed. Its pool is empty, so a sequence
  // that was promised a filled one must not go on. REQUIRES: Done(slot).
  const absl::Status& Health(int slot) const { return slots_[static_cast<size_t>(slot)].status; }

 private:
  // Lists of all layers, one after the other. Each is int32 [layers][capacity].
  struct Lists {
    int32_t *sources, *targets;  // Entries in the home and in the pool.
    int32_t *place_of, *places;  // Rows of the two residency tables.
    int32_t* rows;               // [..][2]: the values of the rows of `places`.
    int32_t* counts;             // [layers]
    int64_t capacity = 0;
    int64_t words = 0;  // Words of all lists together.
  };
  struct Staging {
    Buffer host;
    Buffer device;
    std::unique_ptr<Event> done;
  };
  // One is filled while the other is on its way.
  static constexpr size_t kStagings = 2;

  // The state of a slot's warm-up. The warming thread owns `status` until `enqueued` is set again.
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
  // Makes and sends the lists, and enqueues the transfers.
  void Run(Job job);
  void Loop();

  Device* const device_;
  PagePool* const hbm_;
  PagePool* const dram_;
  const int layers_;
  const int64_t capacity_;  // Entries of a layer, including the next token's.
  std::deque<Slot> slots_;
  // Used only by the thread that runs jobs.
  std::array<Staging, kStagings> stagings_;
  size_t next_ = 0;
  Buffer index_;  // int32 [capacity]: 0, 1, ...
  // Declared after the buffers above, so that its thread ends before they are freed.
  std::unique_ptr<Stream> stream_;

  absl::Mutex mutex_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Not joinable on a device without threads.
};

}  // namespace sluice
