#include "src/engine/rank_leader.h"

#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

RankLeader::RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots,
                       HintPart part)
    : ForwardingPolicy(policy),
      channel_(channel),
      ranks_(ranks),
      part_(part),
      warm_(static_cast<size_t>(slots), false),
      cold_(static_cast<size_t>(slots), false) {}

RankLeader::~RankLeader() {
  plan_.Stop();
  if (ranks_->status().ok()) channel_->Send(plan_.message()).IgnoreError();
}

RankPlanWriter& RankLeader::Next() {
  for (size_t slot = 0; slot < warm_.size(); ++slot) {
    if (warm_[slot]) plan_.Warm(static_cast<int>(slot));
    warm_[slot] = false;
  }
  return plan_;
}

void RankLeader::Send() {
  const absl::Status sent = channel_->Send(plan_.message());
  plan_.Clear();
  if (!sent.ok()) ranks_->Abort(std::string(sent.message()));
}

absl::Status RankLeader::AwaitFreePages() {
  uint32_t message = 0;
  {
    absl::MutexLock lock(&frees_mutex_);
    message = frees_;
  }
  return channel_->AwaitDone(message);
}

bool RankLeader::Admit(int slot, int64_t context, int64_t total, Promise promise,
                       std::unique_ptr<SequenceCache>& home) {
  if (!ForwardingPolicy::Admit(slot, context, total, promise, home)) return false;
  RankAdmission admission{context, total, promise == Promise::kFirm, false, {}};
  if (const SequenceCache* const cache = HostCache(slot); cache != nullptr) {
    admission.has_home = true;
    admission.home = cache->Describe();
  }
  Next().Admit(slot, admission);
  cold_[static_cast<size_t>(slot)] = true;
  return true;
}

void RankLeader::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Next().BeginPrompt(slot, tokens, cached);
  ForwardingPolicy::BeginPrompt(slot, tokens, cached);
}

void RankLeader::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  Next().EndPrompt(slot, tokens, hints);
  hints = HintsOf(hints, part_);
  ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
  cold_[static_cast<size_t>(slot)] = true;
}

bool RankLeader::Warm(int slot) {
  const auto s = static_cast<size_t>(slot);
  if (!cold_[s]) {
    if (!ForwardingPolicy::Warm(slot)) return false;
    warm_[s] = true;
    return true;
  }
  {
    absl::MutexLock lock(&frees_mutex_);
    if (!ForwardingPolicy::Warm(slot)) return false;
    FreesPages();
  }
  cold_[s] = false;
  warm_[s] = true;
  Next();
  Send();
  return true;
}

bool RankLeader::Grow(int slot, int64_t tokens) {
  if (!ForwardingPolicy::Grow(slot, tokens)) return false;
  Next().Grow(slot, tokens);
  return true;
}

void RankLeader::Release(int slot) {
  Next().Release(slot);
  if (HostCache(slot) == nullptr) return ForwardingPolicy::Release(slot);
  {
    absl::MutexLock lock(&frees_mutex_);
    ForwardingPolicy::Release(slot);
    FreesPages();
  }
  Send();
}

bool RankLeader::MakeFirm(int slot) {
  if (!ForwardingPolicy::MakeFirm(slot)) return false;
  Next().MakeFirm(slot);
  return true;
}

bool RankLeader::ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) {
  RankPlanWriter order;  // the prefix's pages, before the policy has them
  order.ReserveHostCopy(slot, tokens, prefix);
  if (!ForwardingPolicy::ReserveHostCopy(slot, tokens, std::move(prefix))) return false;
  Next().Append(order);
  return true;
}

void RankLeader::Evict(int slot, int64_t tokens) {
  ForwardingPolicy::Evict(slot, tokens);
  const SequenceCache* const home = HostCache(slot);
  Next().Evict(slot, tokens, home == nullptr ? RankPages() : home->Describe().pages);
  cold_[static_cast<size_t>(slot)] = true;
}

// The caches may go to another sequence or back to the pool, after the others have let go of them.
std::unique_ptr<SequenceCache> RankLeader::DetachHostCache(int slot) {
  Next().Detach(slot);
  std::unique_ptr<SequenceCache> home;
  {
    absl::MutexLock lock(&frees_mutex_);
    home = ForwardingPolicy::DetachHostCache(slot);
    FreesPages();
  }
  Send();
  return home;
}

void RankLeader::Joined(int slot, const BatchState::Joining& joining) {
  Next().Join(slot, joining);
}

void RankLeader::Launching(int buffer, const StepPlan& plan) {
  Next().Step(buffer, plan);
  Send();
}

}  // namespace sluice
