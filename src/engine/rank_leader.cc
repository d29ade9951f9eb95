#include "src/engine/rank_leader.h"

#include <utility>

#include "absl/time/clock.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// How often another rank is made to look how far its copies are.
constexpr absl::Duration kNudge = absl::Milliseconds(1);

}  // namespace

RankLeader::RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots,
                       RankDivision division)
    : ForwardingPolicy(policy),
      channel_(channel),
      ranks_(ranks),
      division_(std::move(division)),
      placements_({policy}),
      warm_(static_cast<size_t>(slots), false),
      cold_(static_cast<size_t>(slots), false),
      awaited_(static_cast<size_t>(slots), 0),
      soft_(static_cast<size_t>(slots), false),
      counted_(static_cast<size_t>(slots)) {
  placements_.insert(placements_.end(), division_.others.begin(), division_.others.end());
  copies_.resize(placements_.size(), 0);
}

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

bool RankLeader::HasSoft(int rank) const {
  for (size_t slot = 0; slot < soft_.size(); ++slot) {
    if (soft_[slot] && RankOf(static_cast<int>(slot)) == rank) return true;
  }
  return false;
}

bool RankLeader::Admit(int slot, int64_t context, int64_t total, Promise promise,
                       std::unique_ptr<SequenceCache>& home) {
  const auto s = static_cast<size_t>(slot);
  RankAdmission admission{context, total, promise == Promise::kFirm, 0, false, {}};
  if (division_.rows != nullptr) {
    admission.owner = home != nullptr ? home->pool()->rank() : use_rank_;
    // A sequence with a soft promise there is the next to get a firm one.
    if (admission.firm && HasSoft(admission.owner)) return false;
  }
  AttentionPolicy& placement = *placements_[static_cast<size_t>(admission.owner)];
  if (!placement.Admit(slot, context, total, promise, home)) return false;
  if (division_.rows != nullptr) {
    division_.rows->Give(slot, admission.owner);
    counted_[s] =
        division_.ledger->Count(admission.owner, FootprintOf(context, total).hbm_tokens, total);
  }
  if (const SequenceCache* const cache = HostCache(slot); cache != nullptr && TellsPages(slot)) {
    admission.has_home = true;
    admission.home = cache->Describe();
  }
  soft_[s] = !admission.firm;
  Copies(slot);
  Next().Admit(slot, admission);
  return true;
}

SequencePlacement::Headroom RankLeader::HeadroomOf(int rank) const {
  Headroom room = placements_[static_cast<size_t>(rank)]->HeadroomNow();
  if (division_.ledger != nullptr) room.sequences = division_.ledger->sequences(rank);
  return room;
}

void RankLeader::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Next().BeginPrompt(slot, tokens, cached);
  if (!Elsewhere(slot)) ForwardingPolicy::BeginPrompt(slot, tokens, cached);
}

void RankLeader::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  Next().EndPrompt(slot, tokens, hints);
  hints = HintsOf(hints, division_.part);
  if (!Elsewhere(slot)) ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
  Copies(slot);
}

void RankLeader::Copies(int slot) {
  const auto s = static_cast<size_t>(slot);
  cold_[s] = true;
  if (Elsewhere(slot)) awaited_[s] = ++copies_[static_cast<size_t>(RankOf(slot))];
}

bool RankLeader::CopiesAreDone(int slot) {
  if (!cold_[static_cast<size_t>(slot)]) return true;
  const uint32_t done = channel_->Shown(RankOf(slot));
  if (static_cast<int32_t>(done - awaited_[static_cast<size_t>(slot)]) >= 0) return true;
  if (!ranks_->status().ok()) return true;  // nobody will say so
  // The other rank looks when a message comes, and no step sends one while nothing else runs.
  if (const absl::Time now = absl::Now(); !plan_.message().empty() || now >= next_nudge_) {
    Next();
    Send();
    next_nudge_ = now + kNudge;
  }
  return false;
}

bool RankLeader::Warm(int slot) {
  const auto s = static_cast<size_t>(slot);
  if (Elsewhere(slot) && !CopiesAreDone(slot)) return false;
  if (!cold_[s]) {
    if (!At(slot).Warm(slot)) return false;
    warm_[s] = true;
    return true;
  }
  {
    absl::MutexLock lock(&frees_mutex_);
    if (!At(slot).Warm(slot)) return false;
    FreesPages();
  }
  cold_[s] = false;
  warm_[s] = true;
  Next();
  Send();
  return true;
}

bool RankLeader::Grow(int slot, int64_t tokens) {
  if (!At(slot).Grow(slot, tokens)) return false;
  Next().Grow(slot, tokens);
  return true;
}

void RankLeader::Left(int slot) {
  soft_[static_cast<size_t>(slot)] = false;
  counted_[static_cast<size_t>(slot)].reset();
}

void RankLeader::Release(int slot) {
  Next().Release(slot);
  Left(slot);
  if (HostCache(slot) == nullptr) return At(slot).Release(slot);
  {
    absl::MutexLock lock(&frees_mutex_);
    At(slot).Release(slot);
    FreesPages();
  }
  Send();
}

absl::Status RankLeader::SlotHealth(int slot) const {
  // Another rank checks its own, and ends the group.
  return Elsewhere(slot) ? absl::OkStatus() : ForwardingPolicy::SlotHealth(slot);
}

bool RankLeader::MakeFirm(int slot) {
  if (!At(slot).MakeFirm(slot)) return false;
  soft_[static_cast<size_t>(slot)] = false;
  Next().MakeFirm(slot);
  return true;
}

bool RankLeader::ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) {
  RankPlanWriter order;  // the prefix's pages, before the policy has them
  order.ReserveHostCopy(slot, tokens, prefix);
  if (!At(slot).ReserveHostCopy(slot, tokens, std::move(prefix))) return false;
  Next().Append(order);
  return true;
}

void RankLeader::Evict(int slot, int64_t tokens) {
  At(slot).Evict(slot, tokens);
  const SequenceCache* const home = TellsPages(slot) ? HostCache(slot) : nullptr;
  Next().Evict(slot, tokens, home == nullptr ? RankPages() : home->Describe().pages);
  Copies(slot);
}

// The caches may go to another sequence or back to the pool, after the others have let go of them.
std::unique_ptr<SequenceCache> RankLeader::DetachHostCache(int slot) {
  Next().Detach(slot);
  Left(slot);
  std::unique_ptr<SequenceCache> home;
  {
    absl::MutexLock lock(&frees_mutex_);
    home = At(slot).DetachHostCache(slot);
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
