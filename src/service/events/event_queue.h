// A bounded queue between a prefix cache and the thread that publishes its events.
//
// The cache's side never waits. When the queue is full its events are dropped, and so is what comes
// after them, until the other side begins anew with all that the cache has: a list with a hole in
// it would let routers believe in blocks that are gone. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/kv/prefix_events.h"
#include "src/service/events/kv_event.h"

namespace sluice {

class EventQueue final : public PrefixObserver {
 public:
  // Takes so many tokens and hashes, together. `wake` is called, with no lock of the queue held,
  // when there is something to do again; it must return soon.
  EventQueue(size_t max_numbers, std::function<void()> wake);

  void OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                absl::Span<const uint64_t> hashes) override;
  void OnRemoved(absl::Span<const uint64_t> hashes) override;

  // Returns what waits, and leaves the queue empty.
  std::vector<KvEvent> Take();
  // Whether events were dropped since Restart, so that Take returns nothing.
  bool overflowed() const;
  // Forgets that events were dropped, and takes events again.
  void Restart();
  // Returns how many events were dropped since the last call.
  uint64_t TakeDropped();

 private:
  void Add(KvEvent event);

  const size_t max_numbers_;
  const std::function<void()> wake_;
  mutable absl::Mutex mutex_;
  std::vector<KvEvent> events_ ABSL_GUARDED_BY(mutex_);
  size_t numbers_ ABSL_GUARDED_BY(mutex_) = 0;
  bool overflowed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice
