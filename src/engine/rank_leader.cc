#include "src/engine/rank_leader.h"

#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

RankLeader::RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots,
                       RankDivision division)
    : ForwardingPolicy(policy),
      channel_(channel),
      ranks_(ranks),
      division_(std::move(division)),
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
  RankAdmission admission{context, total, promise == Promise::kFirm, 0, false, {}};
  admission.owner = Place(slot, context, total, promise, home);
  if (admission.owner < 0) return false;
  if (const SequenceCache* const cache = Elsewhere(slot) ? nullptr : HostCache(slot);
      division_.rows == nullptr && cache != nullptr) {
    admission.has_home = true;
    admission.home = cache->Describe();
  }
  Next().Admit(slot, admission);
  cold_[static_cast<size_t>(slot)] = true;
  return true;
}

int RankLeader::Place(int slot, int64_t context, int64_t total, Promise promise,
                      std::unique_ptr<SequenceCache>& home) {
  if (division_.rows == nullptr) {
    return ForwardingPolicy::Admit(slot, context, total, promise, home) ? 0 : -1;
  }
  SLUICE_CHECK(context == 0 && home == nullptr, "ranks of experts compute their prompts");
  const Footprint takes = FootprintOf(0, total);
  for (const int rank : division_.ledger->RanksFor(takes)) {
    if (rank == 0 && !ForwardingPolicy::Admit(slot, 0, total, promise, home)) continue;
    division_.ledger->Admit(slot, rank, takes, total);
    division_.rows->Give(slot, rank);
    return rank;
  }
  return -1;
}

SequencePlacement::Headroom RankLeader::HeadroomNow() const {
  return division_.rows != nullptr ? division_.ledger->Headroom() : ForwardingPolicy::HeadroomNow();
}

void RankLeader::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Next().BeginPrompt(slot, tokens, cached);
  if (!Elsewhere(slot)) ForwardingPolicy::BeginPrompt(slot, tokens, cached);
}

void RankLeader::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  Next().EndPrompt(slot, tokens, hints);
  hints = HintsOf(hints, division_.part);
  if (!Elsewhere(slot)) ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
  cold_[static_cast<size_t>(slot)] = true;
}

bool RankLeader::Warm(int slot) {
  const auto s = static_cast<size_t>(slot);
  if (Elsewhere(slot) || !cold_[s]) {
    if (!Elsewhere(slot) && !ForwardingPolicy::Warm(slot)) return false;
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
  if (!Elsewhere(slot) && !ForwardingPolicy::Grow(slot, tokens)) return false;
  Next().Grow(slot, tokens);
  return true;
}

void RankLeader::Release(int slot) {
  Next().Release(slot);
  if (division_.rows != nullptr) {
    if (!Elsewhere(slot)) ForwardingPolicy::Release(slot);
    return division_.ledger->Release(slot);
  }
  if (HostCache(slot) == nullptr) return ForwardingPolicy::Release(slot);
  {
    absl::MutexLock lock(&frees_mutex_);
    ForwardingPolicy::Release(slot);
    FreesPages();
  }
  Send();
}

absl::Status RankLeader::SlotHealth(int slot) const {
  // Another rank checks its own, and ends the group.
  return Elsewhere(slot) ? absl::OkStatus() : ForwardingPolicy::SlotHealth(slot);
}

SequenceCache* RankLeader::HostCacheOfPrompt(int slot) {
  return Elsewhere(slot) ? nullptr : ForwardingPolicy::HostCacheOfPrompt(slot);
}

bool RankLeader::MakeFirm(int slot) {
  if (!ForwardingPolicy::MakeFirm(slot)) return false;
  Next().MakeFirm(slot);
  return true;
}

bool RankLeader::ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) {
  if (division_.rows != nullptr) return false;  // ranks of experts keep nothing
  RankPlanWriter order;                         // the prefix's pages, before the policy has them
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
