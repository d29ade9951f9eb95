// A few threads and a bounded queue, for calls that block. Any thread may post.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

class WorkerQueue {
 public:
  // The threads are named `name`. `capacity` jobs may wait besides those that run.
  WorkerQueue(const std::string& name, int threads, size_t capacity);
  // Runs all accepted jobs, then joins the threads.
  ~WorkerQueue();

  // Returns false if the queue is full; the job is then not taken.
  bool TryPost(std::function<void()> job);

 private:
  void Loop();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !jobs_.empty() || closed_; }

  const size_t capacity_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
