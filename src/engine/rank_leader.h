// RankLeader stands between the engine of rank 0 and its policy and batch, and tells the other
// ranks what happens there (rank_plan.h). A step's plan goes out before the leader enqueues the
// step, so that the others enqueue it meanwhile. Only the engine's thread uses it, as a policy.
//
// Where each rank has sequences of its own, it also chooses the rank of each when it is admitted:
// of those with room the one that has the fewest.
//
// Ranks do not share yet: caches that are handed over, kept or preempted, and drafts. A node
// refuses the settings and requests that would need them.
#pragma once

#include <memory>
#include <vector>

#include "src/attention/forwarding_policy.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_group.h"
#include "src/engine/rank_ledger.h"
#include "src/engine/rank_plan.h"
#include "src/engine/rank_rows.h"

namespace sluice {

// Each rank has sequences of its own: this says which, and what they take of the pools.
struct RankDivision {
  RankRows* rows = nullptr;  // null: every rank has a part of every sequence
  std::unique_ptr<RankLedger> ledger;
};

class RankLeader : public ForwardingPolicy, public BatchLog {
 public:
  // All outlive this. `slots`: of the batch.
  RankLeader(AttentionPolicy* policy, RankChannel* channel, RankGroup* ranks, int slots,
             RankDivision division = {});
  // Tells the others to stop.
  ~RankLeader() override;

  Headroom HeadroomNow() const override;
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override;
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override;
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  // A slot that another rank has is warm as soon as it is asked for: that rank waits until it is.
  bool Warm(int slot) override;
  absl::Status SlotHealth(int slot) const override;
  SequenceCache* HostCacheOfPrompt(int slot) override;
  bool Grow(int slot, int64_t tokens) override;
  void Release(int slot) override;
  bool MakeFirm(int slot) override;
  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override;
  void Evict(int slot, int64_t tokens) override;
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override;

  void Joined(int slot, const BatchState::Joining& joining) override;
  void Launching(int buffer, const StepPlan& plan) override;

 private:
  bool Elsewhere(int slot) const {
    return division_.rows != nullptr && !division_.rows->Owns(slot);
  }
  // Admits a sequence on one of the ranks, and returns which; -1: none has room.
  int Place(int slot, int64_t total, Promise promise, std::unique_ptr<SequenceCache>& home);
  // Puts the slots that are known to be warm since the last order into the plan.
  RankPlanWriter& Next();
  void Send();

  RankChannel* const channel_;
  RankGroup* const ranks_;
  const RankDivision division_;
  RankPlanWriter plan_;
  std::vector<bool> warm_;  // by slot: to be told
};

}  // namespace sluice
