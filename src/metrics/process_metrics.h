// ProcessMetrics reads from the system what the process uses, for a scrape.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

class Metrics;

class ProcessMetrics {
 public:
  // Brings the process_... instruments up to date. Any thread may call it.
  void Update(const Metrics& metrics);

 private:
  absl::Mutex mutex_;
  double counted_cpu_seconds_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice
