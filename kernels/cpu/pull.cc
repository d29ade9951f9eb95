// PullAttention and MergeParts, for every path.
#include "kernels/cpu/pull.h"

#include <chrono>
#include <cmath>
#include <thread>

#include "kernels/pull_part.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// The device's side of one puller's words.
class Puller {
 public:
  void Begin(const PullAttentionParams& p, int32_t index) {
    ask_ = &p.asks[index];
    grant_ = &p.grants[index];
    number_ = ask_->number;
    Ask();
  }
  void Ask() {
    asked_at_ = Clock::now();
    __atomic_store_n(&ask_->number, ++number_, __ATOMIC_RELEASE);
  }
  // Returns whether the last ask has its answer; then grant() is that.
  bool Answered() const { return __atomic_load_n(&grant_->number, __ATOMIC_ACQUIRE) == number_; }
  const PullGrant& grant() const { return *grant_; }
  bool Late(uint64_t deadline_ns) const {
    const std::chrono::nanoseconds waited = Clock::now() - asked_at_;
    return static_cast<uint64_t>(waited.count()) > deadline_ns;
  }

 private:
  PullAsk* ask_ = nullptr;
  const PullGrant* grant_ = nullptr;
  uint32_t number_ = 0;
  Clock::time_point asked_at_;
};

void AttendToPart(SparseAttentionFunction attend, const PullAttentionParams& p, int32_t list,
                  int32_t part) {
  const PartUnits units = UnitsOfPart(p, list, part);
  attend(AttentionOfPart(p, list, part, units), {0, 1});
  p.taken[list] |= uint32_t{1} << part;
}

// Looks once for the puller's grant, and attends to what that names. Returns whether the puller
// waits for another.
bool Turn(SparseAttentionFunction attend, const PullAttentionParams& p, Puller& puller) {
  if (!puller.Answered()) {
    if (!puller.Late(p.deadline_ns)) return true;
    if (!puller.Answered()) {
      __atomic_store_n(p.missed, 1u, __ATOMIC_RELEASE);
      return false;
    }
  }
  const int32_t list = puller.grant().list, part = puller.grant().part;
  if (list < 0) return false;
  puller.Ask();
  AttendToPart(attend, p, list, part);
  return true;
}

void MergeHead(const MergePartsParams& p, int64_t list, int64_t head, uint32_t taken) {
  const int64_t group = p.heads / p.kv_heads, item = list * group + head;
  const auto at = [&](uint32_t parts) {
    return (list * p.most_parts + __builtin_ctz(parts)) * group + head;
  };
  float* const o = p.o + item * p.head_dim;
  for (int64_t d = 0; d < p.head_dim; ++d) o[d] = 0;
  float largest = kNegativeInfinity, sum = 0;
  for (uint32_t left = taken; left != 0; left &= left - 1) {
    largest = std::fmax(largest, p.part_lse[at(left)]);
  }
  for (uint32_t left = taken; left != 0; left &= left - 1) {
    const float lse = p.part_lse[at(left)];
    if (lse == kNegativeInfinity) continue;
    const float weight = std::exp(lse - largest);
    const float* const part = p.part_o + at(left) * p.head_dim;
    sum += weight;
    for (int64_t d = 0; d < p.head_dim; ++d) o[d] += weight * part[d];
  }
  p.lse[item] = sum == 0 ? kNegativeInfinity : largest + std::log(sum);
  if (sum == 0) return;
  for (int64_t d = 0; d < p.head_dim; ++d) o[d] /= sum;
}

}  // namespace

void PullAttentionBy(SparseAttentionFunction attend, const PullAttentionParams& p, Worker worker) {
  if (p.pullers > kMostPullers) KernelCheckFailed("pull_attention: at most 128 pullers");
  if (worker.index != 0 || __atomic_load_n(p.closed, __ATOMIC_ACQUIRE) != 0) return;
  Puller pullers[kMostPullers];
  bool waits[kMostPullers];
  for (int32_t i = 0; i < p.pullers; ++i) {
    pullers[i].Begin(p, i);
    waits[i] = true;
  }
  for (int32_t left = p.pullers; left > 0;) {
    for (int32_t i = 0; i < p.pullers; ++i) {
      if (!waits[i] || Turn(attend, p, pullers[i])) continue;
      waits[i] = false;
      --left;
    }
    std::this_thread::yield();
  }
}

void MergeParts(const MergePartsParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const uint32_t taken = p.taken[list];
    p.taken[list] = 0;
    if (p.slots[list / p.kv_heads] < 0) continue;
    for (int64_t head = 0; head < p.heads / p.kv_heads; ++head) MergeHead(p, list, head, taken);
  }
}

}  // namespace sluice::kernels::cpu
