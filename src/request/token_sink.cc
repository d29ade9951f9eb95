#include "src/request/token_sink.h"

#include <utility>

#include "src/base/failpoint.h"
#include "src/base/status_macros.h"

namespace sluice {

TokenStream::TokenStream(size_t capacity, std::function<void()> on_room)
    : capacity_(capacity), on_room_(std::move(on_room)) {}

bool TokenStream::HasRoom(size_t count) const {
  if (SLUICE_FAILPOINT(kDecodeSink)) return false;
  absl::MutexLock lock(&mutex_);
  return tokens_.size() + count <= capacity_;
}

void TokenStream::Emit(OutputToken token) {
  {
    absl::MutexLock lock(&mutex_);
    SLUICE_CHECK(!finish_.has_value() && tokens_.size() < capacity_);
    tokens_.push_back(std::move(token));
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

bool TokenStream::Readable() const {
  return !tokens_.empty() || (finish_.has_value() && !finish_read_);
}

TokenStream::Batch TokenStream::TakeLocked(bool* freed) {
  Batch batch;
  *freed = !tokens_.empty();
  batch.tokens.assign(std::make_move_iterator(tokens_.begin()),
                      std::make_move_iterator(tokens_.end()));
  tokens_.clear();
  if (finish_.has_value() && !finish_read_) {
    finish_read_ = true;
    batch.finish = finish_;
  }
  return batch;
}

TokenStream::Batch TokenStream::Read() {
  Batch batch;
  bool freed = false;
  {
    absl::MutexLock lock(&mutex_);
    // The engine parks a sequence a few tokens before the queue is full, so "was it full" is its
    // business; a reader that took at least half of it makes room worth waking up for.
    const bool was_long = tokens_.size() * 2 >= capacity_;
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
