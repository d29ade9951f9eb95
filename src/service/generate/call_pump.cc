#include "src/service/generate/call_pump.h"

#include <pthread.h>

#include "src/base/status_macros.h"

namespace sluice {

CallPump::CallPump() : thread_([this] { Loop(); }) {}

CallPump::~CallPump() {
  {
    absl::MutexLock lock(&mutex_);
    SLUICE_CHECK(first_ == nullptr, "a call outlives the pump");
    stopping_ = true;
    queued_.Signal();
  }
  thread_.join();
}

void CallPump::Wake(Source* source) {
  absl::MutexLock lock(&mutex_);
  if (source->queued_) return;
  source->queued_ = true;
  source->next_ = nullptr;
  (first_ == nullptr ? first_ : last_->next_) = source;
  last_ = source;
  queued_.Signal();
}

void CallPump::Forget(Source* source) {
  absl::MutexLock lock(&mutex_);
  if (source->queued_) {
    Source* before = nullptr;
    for (Source* at = first_; at != source; at = at->next_) before = at;
    (before == nullptr ? first_ : before->next_) = source->next_;
    if (last_ == source) last_ = before;
    source->queued_ = false;
  }
  while (running_ == source) ran_.Wait(&mutex_);
}

void CallPump::Loop() {
  pthread_setname_np(pthread_self(), "call-pump");
  absl::MutexLock lock(&mutex_);
  for (;;) {
    while (first_ == nullptr && !stopping_) queued_.Wait(&mutex_);
    if (first_ == nullptr) return;
    running_ = first_;
    first_ = running_->next_;
    running_->queued_ = false;
    mutex_.Unlock();
    running_->Pump();
    mutex_.Lock();
    running_ = nullptr;
    ran_.SignalAll();
  }
}

}  // namespace sluice
