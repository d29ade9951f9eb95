// RankLeader stands between the engine of rank 0 and its policy and batch, and tells the other
// ranks what happens there (rank_plan.h). A step's plan goes out before the leader enqueues the
// step, so that the others enqueue it meanwhile. Only the engine's thread uses it, as a policy.
//
// Sequences have the same pages of DRAM on every rank: the leader's. Those that the leader gives
// back are free to its own engine at once, because the others carry out its orders in turn. Whoever
// else writes to a page waits with AwaitFreePages.
//
// Where each rank has sequences of its own, the leader has pools of every rank's size and a policy
// on each pair of them, which copies and computes nothing (planning_device.h). They place the
// sequences of that rank as its own policy does a little later: so the leader knows what is free
// there, and which pages of the rank's DRAM a sequence has. A sequence with caches runs where they
// are, and another where the engine says (UseRank). No ranks share drafts. The copies of such a
// rank's sequences (to HBM, to the working set, to DRAM) go on beneath its steps as at home: the
// rank counts those that are done, in the order in which they were asked for, and a slot is warm
// when its number has come.
#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/attention/forwarding_policy.h"
#include "src/device/device.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_group.h"
#include "src/engine/rank_plan.h"
#include "src/engine/rank_rows.h"
#include "src/kv/rank_ledger.h"

namespace sluice {

// How ranks divide sequences.
struct RankDivision {
  HintPart part;  // the heads of hints that are this rank's
  // Each rank has sequences of its own: these say which, what they take, and how the ranks from 1
  // on place them. All outlive the leader.
  RankRows* rows = nullptr;  // null: every rank has a part of every sequence
  RankLedger* ledger = nullptr;
  std::vector<AttentionPolicy*> others;
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
  int ranks() const override { return static_cast<int>(placements_.size()); }
  Headroom HeadroomOf(int rank) const override;
  void UseRank(int rank) override { use_rank_ = rank; }
  int RankOf(int slot) const override {
    return division_.rows == nullptr ? 0 : division_.rows->OwnerOf(slot);
  }
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override;
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override;
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  bool Warm(int slot) override;
  Event& WarmEvent(int slot) override {
    return Elsewhere(slot) ? elsewhere_ : At(slot).WarmEvent(slot);
  }
  absl::Status SlotHealth(int slot) const override;
  const SequenceCache* HostCache(int slot) const override { return At(slot).HostCache(slot); }
  SequenceCache* HostCacheOfPrompt(int slot) override { return At(slot).HostCacheOfPrompt(slot); }
  bool Grow(int slot, int64_t tokens) override;
  void Release(int slot) override;
  bool MakeFirm(int slot) override;
  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override;
  void Evict(int slot, int64_t tokens) override;
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override;

  void Joined(int slot, const BatchState::Joining& joining) override;
  void Launching(int buffer, const StepPlan& plan) override;

 private:
  // Stands for copies of another rank, of which only Warm knows: it is never ready. The engine then
  // asks Warm again in a while.
  class CopyElsewhere final : public Event {
   public:
    bool Ready() const override { return false; }
    void Wait() const override {}
  };

  // Says that the next message tells the others of pages that go back now.
  void FreesPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(frees_mutex_) { frees_ = channel_->sent() + 1; }
  bool Elsewhere(int slot) const {
    return division_.rows != nullptr && !division_.rows->Owns(slot);
  }
  // Returns what places the sequence of a slot: this rank's policy, or the one that stands for
  // another rank's.
  AttentionPolicy& At(int slot) const { return *placements_[static_cast<size_t>(RankOf(slot))]; }
  // Returns whether another rank has a host cache of the slot, whose pages it must be told.
  bool TellsPages(int slot) const { return division_.rows == nullptr || Elsewhere(slot); }
  // Says that copies of a slot begin with the next order.
  void Copies(int slot);
  // Returns whether the copies of a slot that another rank has are done.
  bool CopiesAreDone(int slot);
  // Forgets the sequence that a slot had.
  void Left(int slot);
  // Returns whether a sequence with a soft promise runs on the rank.
  bool HasSoft(int rank) const;
  // Puts the slots that are known to be warm since the last order into the plan.
  RankPlanWriter& Next();
  void Send();

  RankChannel* const channel_;
  RankGroup* const ranks_;
  const RankDivision division_;
  std::vector<AttentionPolicy*> placements_;  // by rank; one where ranks divide every sequence
  int use_rank_ = 0;
  RankPlanWriter plan_;
  std::vector<bool> warm_;         // by slot: to be told
  std::vector<bool> cold_;         // by slot: whether Warm may give pages back
  std::vector<uint32_t> copies_;   // by rank: how often copies of its slots were asked for
  std::vector<uint32_t> awaited_;  // by slot: the number of its newest copies there
  CopyElsewhere elsewhere_;
  absl::Time next_nudge_;   // before which no message goes out for copies alone
  std::vector<bool> soft_;  // by slot: whether its promise is soft
  std::vector<std::shared_ptr<const void>> counted_;  // by slot: its share in the ledger
  // Held while pages go back, so that whoever then finds them free finds the message's number too.
  absl::Mutex frees_mutex_;
  uint32_t frees_ ABSL_GUARDED_BY(frees_mutex_) = 0;  // number of the newest message that frees
};

}  // namespace sluice
