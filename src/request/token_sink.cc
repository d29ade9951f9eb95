#include "src/request/token_sink.h"

#include <algorithm>
#include <utility>

#include "src/base/failpoint.h"
#include "src/base/status_macros.h"

namespace sluice {

TokenStream::TokenStream(size_t capacity, std::function<void()> on_room)
    : capacity_(capacity), on_room_(std::move(on_room)) {}

bool TokenStream::HasRoom(size_t count) const {
  if (SLUICE_FAILPOINT(kDecodeSink)) return false;
  absl::MutexLock lock(&mutex_);
  return size_ + count <= capacity_;
}

void TokenStream::Emit(OutputToken token) {
  {
    absl::MutexLock lock(&mutex_);
    SLUICE_CHECK(!finish_.has_value() && size_ < capacity_);
    if (size_ == ring_.size()) {
      std::rotate(ring_.begin(), ring_.begin() + static_cast<ptrdiff_t>(first_), ring_.end());
      first_ = 0;
      ring_.resize(std::min(capacity_, std::max<size_t>(16, 2 * size_)));
    }
    ring_[(first_ + size_) % ring_.size()] = token;
    ++size_;
    readable_.Signal();
  }
  Notify();
}

void TokenStream::Finish(FinishInfo info) {
  {
    absl::MutexLock lock(&mutex_);
    SLUICE_CHECK(!finish_.has_value(), "a stream ends exactly once");
    finish_ = std::move(info);
    readable_.Signal();
  }
  Notify();
}

void TokenStream::Notify() {
  absl::MutexLock lock(&callback_mutex_);
  if (on_ready_ != nullptr) on_ready_();
}

void TokenStream::SetReadyCallback(std::function<void()> on_ready) {
  absl::MutexLock lock(&callback_mutex_);
  on_ready_ = std::move(on_ready);
  if (on_ready_ == nullptr) return;
  bool readable;
  {
    absl::MutexLock queue_lock(&mutex_);
    readable = Readable();
  }
  if (readable) on_ready_();
}

bool TokenStream::Readable() const { return size_ > 0 || (finish_.has_value() && !finish_read_); }

TokenStream::Batch TokenStream::TakeLocked(bool* freed) {
  Batch batch;
  *freed = size_ > 0;
  batch.tokens.reserve(size_);
  for (; size_ > 0; --size_) {
    batch.tokens.push_back(ring_[first_]);
    first_ = (first_ + 1) % ring_.size();
  }
  if (finish_.has_value() && !finish_read_) {
    finish_read_ = true;
    batch.finish = finish_;
  }
  return batch;
}

bool TokenStream::Finished() const {
  absl::MutexLock lock(&mutex_);
  return finish_.has_value();
}

TokenStream::Batch TokenStream::Read() {
  Batch batch;
  bool freed = false;
  {
    absl::MutexLock lock(&mutex_);
    // The engine parks a sequence a few tokens before the queue is full, so only the engine knows
    // whether it did. A reader that took at least half of the queue makes room worth waking up for.
    const bool was_long = size_ * 2 >= capacity_;
    batch = TakeLocked(&freed);
    freed = freed && was_long;
  }
  if (freed && on_room_ != nullptr) on_room_();
  return batch;
}

TokenStream::Batch TokenStream::ReadBlocking() {
  Batch batch;
  bool freed = false;
  {
    absl::MutexLock lock(&mutex_);
    while (!Readable()) readable_.Wait(&mutex_);
    batch = TakeLocked(&freed);
  }
  if (freed && on_room_ != nullptr) on_room_();
  return batch;
}

}  // namespace sluice
