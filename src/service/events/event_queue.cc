// The queue of events: what is added, dropped and taken.
#include "src/service/events/event_queue.h"

#include <utility>

namespace sluice {

EventQueue::EventQueue(size_t max_numbers, std::function<void()> wake)
    : max_numbers_(max_numbers), wake_(std::move(wake)) {}

void EventQueue::OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                          absl::Span<const uint64_t> hashes) {
  Add({KvEvent::Kind::kStored,
       {hashes.begin(), hashes.end()},
       parent,
       {tokens.begin(), tokens.end()}});
}

void EventQueue::OnRemoved(absl::Span<const uint64_t> hashes) {
  Add({KvEvent::Kind::kRemoved, {hashes.begin(), hashes.end()}, std::nullopt, {}});
}

void EventQueue::Add(KvEvent event) {
  const size_t numbers = event.tokens.size() + event.hashes.size();
  bool wake = false;
  {
    absl::MutexLock lock(&mutex_);
    if (overflowed_) {
      ++dropped_;
      return;
    }
    wake = events_.empty();
    if (numbers_ + numbers > max_numbers_) {
      wake = true;
      overflowed_ = true;
      dropped_ += events_.size() + 1;
      events_.clear();
      numbers_ = 0;
    } else {
      numbers_ += numbers;
      events_.push_back(std::move(event));
    }
  }
  if (wake) wake_();
}

std::vector<KvEvent> EventQueue::Take() {
  absl::MutexLock lock(&mutex_);
  numbers_ = 0;
  return std::exchange(events_, {});
}

bool EventQueue::overflowed() const {
  absl::MutexLock lock(&mutex_);
  return overflowed_;
}

void EventQueue::Restart() {
  absl::MutexLock lock(&mutex_);
  overflowed_ = false;
  events_.clear();
  numbers_ = 0;
}

uint64_t EventQueue::TakeDropped() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(dropped_, 0);
}

}  // namespace sluice
