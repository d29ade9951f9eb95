// The CPU device's own record of what its streams' threads ran.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "src/device/trace.h"

namespace sluice {

// The streams of a device share the log, which outlives them. While nobody traces, a command costs
// one relaxed load.
class CpuTraceLog {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }
  uint32_t NewStreamId() { return next_stream_.fetch_add(1, std::memory_order_relaxed); }
  // Adds a slice; a stream's thread calls it. The slice is dropped if the trace has ended.
  void Add(TraceSlice slice);

  // FAILED_PRECONDITION if a trace is already under way.
  absl::StatusOr<std::unique_ptr<DeviceTrace>> Start();
  std::vector<TraceSlice> Stop();

 private:
  std::atomic<bool> on_{false};
  std::atomic<uint32_t> next_stream_{1};
  absl::Mutex mutex_;
  std::vector<TraceSlice> slices_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
