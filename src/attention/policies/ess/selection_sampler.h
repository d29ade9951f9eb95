// Watches what one sequence selects while a node serves, until it is known how many entries
// sequences miss in pools of other sizes (selection_reuse.h). So a node that was given no profile
// makes one of its first traffic. A step copies the lists of its first decode row, which belongs to
// its oldest sequence; a thread of the sampler's does the arithmetic beside the steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/latent_params.h"
#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/selection_reuse.h"
#include "src/device/device.h"

namespace sluice {

// The engine's thread calls everything but active().
class SelectionSampler {
 public:
  // Gets the points once, on the sampler's thread.
  using Done = std::function<void(std::vector<MissProfile::Point>)>;

  // RESOURCE_EXHAUSTED: there is no memory for the lists, int32 [layers][top_k] five times.
  static absl::StatusOr<std::unique_ptr<SelectionSampler>> Create(Device* device, int layers,
                                                                  int top_k, Done done);
  // Every step that copied lists must have ended.
  ~SelectionSampler();

  // Returns whether steps still have to copy their lists. Any thread.
  bool active() const { return active_.load(std::memory_order_relaxed); }
  // Enqueues the copy of a layer's list of row 0, in recordings too. REQUIRES: `lists` are those of
  // a selection that is enqueued on this stream.
  void Sample(Stream& stream, int layer, const kernels::UnitLists& lists) const;
  // Takes over what the step before copied. Row 0 of this step belongs to the sequence in `slot`
  // and computes the token at `position`; slot -1: the step has no decode row. Called before the
  // step is enqueued on this stream.
  void BeginStep(Stream& stream, int32_t slot, int64_t position);

 private:
  static constexpr size_t kCopies = 4;  // Steps that the thread may be behind.
  // Steps of a sequence that the thread may skip without taking it for another.
  static constexpr int64_t kMostSkipped = 64;
  struct Row {
    int32_t slot = -1;
    int64_t position = 0;
  };
  struct Copy {
    Buffer lists;  // pinned
    std::unique_ptr<Event> done;
    bool free = true;  // guarded by mutex_
  };

  SelectionSampler(int layers, int top_k, Done done);
  void Run();
  void Count(const Copy& copy, Row row);

  const int top_k_;
  const Done done_;
  Buffer lists_;  // device memory
  std::vector<Copy> copies_;
  Row before_;  // of the step before
  std::atomic<bool> active_{true};

  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::pair<size_t, Row>> queue_ ABSL_GUARDED_BY(mutex_);  // copies to count

  SelectionReuse reuse_;  // the thread's
  Row counted_;           // the thread's: the row that was counted last
  std::thread thread_;
};

}  // namespace sluice
