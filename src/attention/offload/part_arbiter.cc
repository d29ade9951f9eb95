#include "src/attention/offload/part_arbiter.h"

#include <atomic>

namespace sluice {

PartArbiter::PartArbiter(const PullWords& words, int pullers)
    : words_(words), granted_(static_cast<size_t>(pullers)) {}

void PartArbiter::Begin() {
  left_.clear();
  turn_ = 0;
  told_ = 0;
}

// A puller asks only once its last ask is answered, so its number is at most one further.
int PartArbiter::Asking() {
  const int pullers = static_cast<int>(granted_.size());
  for (int i = 0; i < pullers; ++i) {
    const int puller = puller_;
    puller_ = puller + 1 < pullers ? puller + 1 : 0;
    const std::atomic_ref<uint32_t> asked(words_.asks[puller].number);
    if (asked.load(std::memory_order_acquire) != granted_[static_cast<size_t>(puller)]) {
      return puller;
    }
  }
  return -1;
}

PartArbiter::Part PartArbiter::Claim(const PartBoard& board) {
  while (!left_.empty()) {
    if (turn_ == 0) turn_ = left_.size();
    const size_t at = --turn_;
    const int64_t list = left_[at];
    const int part = board.ClaimLast(list);
    if (part >= 0) return {list, part};
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return {};
}

void PartArbiter::Grant(int puller, Part part) {
  kernels::PullGrant& grant = words_.grants[puller];
  grant.list = static_cast<int32_t>(part.list);
  grant.part = part.part;
  if (part.list < 0) ++told_;
  const uint32_t number = ++granted_[static_cast<size_t>(puller)];
  std::atomic_ref<uint32_t>(grant.number).store(number, std::memory_order_release);
}

void PartArbiter::Close() const {
  std::atomic_ref<uint32_t>(*words_.closed).store(1, std::memory_order_release);
}

bool PartArbiter::closed() const {
  return std::atomic_ref<uint32_t>(*words_.closed).load(std::memory_order_acquire) != 0;
}

bool PartArbiter::missed() const {
  return std::atomic_ref<uint32_t>(*words_.missed).load(std::memory_order_acquire) != 0;
}

}  // namespace sluice
