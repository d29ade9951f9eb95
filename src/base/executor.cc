#include "src/base/executor.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace internal {

bool TimedQueue::Later(const Entry& a, const Entry& b) {
  return a.when != b.when ? a.when > b.when : a.order > b.order;
}

void TimedQueue::Push(absl::Time when, Executor::Function function) {
  SLUICE_CHECK(function != nullptr, "an empty function was handed to an executor");
  heap_.push_back(Entry{when, next_order_++, std::move(function)});
  std::push_heap(heap_.begin(), heap_.end(), Later);
}

std::optional<Executor::Function> TimedQueue::PopDue(absl::Time now) {
  if (heap_.empty() || heap_.front().when > now) return std::nullopt;
  std::pop_heap(heap_.begin(), heap_.end(), Later);
  Executor::Function function = std::move(heap_.back().function);
  heap_.pop_back();
  return function;
}

absl::Time TimedQueue::NextTime() const {
  return heap_.empty() ? absl::InfiniteFuture() : heap_.front().when;
}

}  // namespace internal

namespace {

class ThreadExecutor : public Executor {
 public:
  ThreadExecutor(std::string name, Clock* clock)
      : name_(std::move(name)), clock_(clock), thread_([this] { Run(); }) {}

  ~ThreadExecutor() override {
    {
      absl::MutexLock lock(&mutex_);
      stop_at_ = clock_->Now();
      stopping_ = true;
      wake_.Signal();
    }
    thread_.join();
  }

  void Post(Function function) override {
    absl::MutexLock lock(&mutex_);
    // The clock is read under the lock: one caller's functions keep their order.
    Push(clock_->Now(), std::move(function));
  }

  void PostAt(absl::Time when, Function function) override {
    absl::MutexLock lock(&mutex_);
    Push(std::max(when, clock_->Now()), std::move(function));
  }

 private:
  void Push(absl::Time when, Function function) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stopping_) return;
    const bool first = when < queue_.NextTime();
    queue_.Push(when, std::move(function));
    if (first) wake_.Signal();
  }

  void Run() {
    pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
    while (std::optional<Function> function = WaitForNext()) (*function)();
  }

  // The next function that is due, or nothing once the executor is stopping and has run its last.
  std::optional<Function> WaitForNext() {
    absl::MutexLock lock(&mutex_);
    while (true) {
      const absl::Time now = stopping_ ? stop_at_ : clock_->Now();
      if (std::optional<Function> function = queue_.PopDue(now)) return function;
      if (stopping_) return std::nullopt;
      // A relative wait: the injected clock need not agree with the system's.
      wake_.WaitWithTimeout(&mutex_, queue_.NextTime() - now);
    }
  }

  const std::string name_;
  Clock* const clock_;
  absl::Mutex mutex_;
  absl::CondVar wake_;
  internal::TimedQueue queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time stop_at_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses everything above
};

}  // namespace

std::unique_ptr<Executor> NewThreadExecutor(std::string name, Clock* clock) {
  return std::make_unique<ThreadExecutor>(std::move(name), clock);
}

void ManualExecutor::Post(Function function) { queue_.Push(clock_->Now(), std::move(function)); }

void ManualExecutor::PostAt(absl::Time when, Function function) {
  queue_.Push(std::max(when, clock_->Now()), std::move(function));
}

bool ManualExecutor::RunOne() {
  std::optional<Function> function = queue_.PopDue(clock_->Now());
  if (!function.has_value()) return false;
  (*function)();
  return true;
}

size_t ManualExecutor::RunDue() {
  size_t ran = 0;
  while (RunOne()) ++ran;
  return ran;
}

size_t ManualExecutor::Advance(absl::Duration duration) {
  const absl::Time end = clock_->Now() + duration;
  size_t ran = RunDue();
  while (queue_.NextTime() <= end) {
    clock_->Advance(queue_.NextTime() - clock_->Now());
    ran += RunDue();
  }
  if (clock_->Now() < end) clock_->Advance(end - clock_->Now());
  return ran;
}

}  // namespace sluice
