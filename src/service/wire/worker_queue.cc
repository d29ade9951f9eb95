#include "src/service/wire/worker_queue.h"

#include <pthread.h>

#include <utility>

#include "src/base/failpoint.h"

namespace sluice {

WorkerQueue::WorkerQueue(const std::string& name, int threads, size_t capacity)
    : capacity_(capacity) {
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { Loop(); });
    // Linux takes 15 characters.
    pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
  }
}

WorkerQueue::~WorkerQueue() {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool WorkerQueue::TryPost(std::function<void()> job) {
  if (SLUICE_FAILPOINT(kServiceQueue)) return false;
  absl::MutexLock lock(&mutex_);
  if (closed_ || jobs_.size() >= capacity_) return false;
  jobs_.push_back(std::move(job));
  return true;
}

void WorkerQueue::Loop() {
  for (;;) {
    std::function<void()> job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &WorkerQueue::HasWork));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace sluice
