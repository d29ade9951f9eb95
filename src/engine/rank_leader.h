// RankLeader stands between the engine of rank 0 and its policy and batch, and tells the other
// ranks what happens there (rank_plan.h). A step's plan goes out before the leader enqueues the
// step, so that the others enqueue it meanwhile. Only the engine's thread uses it, as a policy.
//
// Sequences have the same pages of DRAM on every rank: the leader's. Those that the leader gives
// back are free to its own engine at once, because the others carry out its orders in turn. Whoever
// else writes to a page waits with AwaitFreePages.
//
// Where each rank has sequences of its own, it also chooses the rank of each when it is admitted:
// of those with room the one that has the fewest. Such ranks do not share yet: caches that are
// handed over, kept or preempted. No ranks share drafts. A node refuses the settings and requests
// that would need them.
#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "src/attention/forwarding_policy.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_group.h"
#include "src/engine/rank_ledger.h"
#include "src/engine/rank_plan.h"
#include "src/engine/rank_rows.h"

namespace sluice {

// How ranks divide sequences.
struct RankDivision {
  HintPart part;  // the heads of hints that are this rank's
  // Each rank has sequences of its own: these say which, and what they take of the pools.
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

  // Waits until no rank uses pages that the leader has given back before the call. UNAVAILABLE: a
  // rank is lost. Any thread but the engine's.
  absl::Status AwaitFreePages() ABSL_LOCKS_EXCLUDED(frees_mutex_);

  // Hints are of the whole model.
  int64_t hint_queries() const override {
    return division_.part.QueriesOfAll(ForwardingPolicy::hint_queries());
  }
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
  // Says that the next message tells the others of pages that go back now.
  void FreesPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(frees_mutex_) { frees_ = channel_->sent() + 1; }
  bool Elsewhere(int slot) const {
    return division_.rows != nullptr && !division_.rows->Owns(slot);
  }
  // Admits a sequence on one of the ranks, and returns which; -1: none has room.
  int Place(int slot, int64_t context, int64_t total, Promise promise,
            std::unique_ptr<SequenceCache>& home);
  // Puts the slots that are known to be warm since the last order into the plan.
  RankPlanWriter& Next();
  void Send();

  RankChannel* const channel_;
  RankGroup* const ranks_;
  const RankDivision division_;
  RankPlanWriter plan_;
  std::vector<bool> warm_;  // by slot: to be told
  std::vector<bool> cold_;  // by slot: whether Warm may give pages back
  // Held while pages go back, so that whoever then finds them free finds the message's number too.
  absl::Mutex frees_mutex_;
  uint32_t frees_ ABSL_GUARDED_BY(frees_mutex_) = 0;  // number of the newest message that frees
};

}  // namespace sluice
