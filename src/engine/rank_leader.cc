#include "src/engine/rank_leader.h"

#include <utility>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr char kNotShared[] = "ranks do not preempt and keep nothing";

}  // namespace

RankLeader::RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots,
                       RankDivision division)
    : ForwardingPolicy(policy),
      channel_(channel),
      ranks_(ranks),
      division_(std::move(division)),
      warm_(static_cast<size_t>(slots), false) {}

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

bool RankLeader::Admit(int slot, int64_t context, int64_t total, Promise promise,
                       std::unique_ptr<SequenceCache>& home) {
  SLUICE_CHECK(context == 0 && home == nullptr, "ranks compute their prompts");
  const int owner = Place(slot, total, promise, home);
  if (owner < 0) return false;
  Next().Admit(slot, total, promise == Promise::kFirm, owner);
  return true;
}

int RankLeader::Place(int slot, int64_t total, Promise promise,
                      std::unique_ptr<SequenceCache>& home) {
  if (division_.rows == nullptr) {
    return ForwardingPolicy::Admit(slot, 0, total, promise, home) ? 0 : -1;
  }
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
  Next().EndPrompt(slot, tokens);
  if (!Elsewhere(slot)) ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
}

bool RankLeader::Warm(int slot) {
  if (!Elsewhere(slot) && !ForwardingPolicy::Warm(slot)) return false;
  warm_[static_cast<size_t>(slot)] = true;
  return true;
}

bool RankLeader::Grow(int slot, int64_t tokens) {
  if (!Elsewhere(slot) && !ForwardingPolicy::Grow(slot, tokens)) return false;
  Next().Grow(slot, tokens);
  return true;
}

void RankLeader::Release(int slot) {
  Next().Release(slot);
  if (!Elsewhere(slot)) ForwardingPolicy::Release(slot);
  if (division_.rows != nullptr) division_.ledger->Release(slot);
}

absl::Status RankLeader::SlotHealth(int slot) const {
  // Another rank checks its own, and ends the group.
  return Elsewhere(slot) ? absl::OkStatus() : ForwardingPolicy::SlotHealth(slot);
}

SequenceCache* RankLeader::HostCacheOfPrompt(int slot) {
  return Elsewhere(slot) ? nullptr : ForwardingPolicy::HostCacheOfPrompt(slot);
}

bool RankLeader::MakeFirm(int) {
  SLUICE_CHECK(false, kNotShared);
  return false;
}
bool RankLeader::ReserveHostCopy(int, int64_t, SharedPrefix) { return false; }
void RankLeader::Evict(int, int64_t) { SLUICE_CHECK(false, kNotShared); }
std::unique_ptr<SequenceCache> RankLeader::DetachHostCache(int) {
  SLUICE_CHECK(false, kNotShared);
  return nullptr;
}

void RankLeader::Joined(int slot, const BatchState::Joining& joining) {
  Next().Join(slot, joining);
}

void RankLeader::Launching(int buffer, const StepPlan& plan) {
  Next().Step(buffer, plan);
  Send();
}

}  // namespace sluice
