#include "src/engine/rank_leader.h"

#include <utility>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr char kNotShared[] = "ranks do not preempt and keep nothing";

}  // namespace

RankLeader::RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots)
    : ForwardingPolicy(policy),
      channel_(channel),
      ranks_(ranks),
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
  if (!ForwardingPolicy::Admit(slot, context, total, promise, home)) return false;
  Next().Admit(slot, total, promise == Promise::kFirm);
  return true;
}

void RankLeader::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Next().BeginPrompt(slot, tokens, cached);
  ForwardingPolicy::BeginPrompt(slot, tokens, cached);
}

void RankLeader::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  Next().EndPrompt(slot, tokens);
  ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
}

bool RankLeader::Warm(int slot) {
  if (!ForwardingPolicy::Warm(slot)) return false;
  warm_[static_cast<size_t>(slot)] = true;
  return true;
}

bool RankLeader::Grow(int slot, int64_t tokens) {
  if (!ForwardingPolicy::Grow(slot, tokens)) return false;
  Next().Grow(slot, tokens);
  return true;
}

void RankLeader::Release(int slot) {
  Next().Release(slot);
  ForwardingPolicy::Release(slot);
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
