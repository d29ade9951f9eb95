// The engine's insides, shared by engine.cc (what any thread may call), turn.cc (the phases of a
// turn), placement.cc (who comes into the batch, leaves it and comes back) and sequence_life.cc
// (how a sequence comes, emits and goes).
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "src/base/readiness.h"
#include "src/base/rng.h"
#include "src/engine/batch_state.h"
#include "src/engine/engine.h"
#include "src/engine/inbox.h"
#include "src/engine/sequence.h"
#include "src/engine/turn_trace.h"
#include "src/request/finish_rate.h"
#include "src/scheduler/admission.h"
#include "src/scheduler/planner.h"

namespace sluice {

class EngineImpl : public Engine {
 public:
  EngineImpl(const Options& options, const Parts& parts, std::unique_ptr<BatchState> batch,
             std::unique_ptr<Stream> stream);
  ~EngineImpl() override;

  absl::StatusOr<SequenceId> Submit(Request request) override;
  void Cancel(SequenceId id, absl::Status why) override;
  void CancelRequest(const std::string& request_id, absl::Status why,
                     std::function<void(bool)> done) override;
  bool Forget(const std::string& sequence_id, const std::string& tenant) override {
    return parts_.transfers->kept().Forget(sequence_id, tenant);
  }
  void Snapshot(std::function<void(EngineSnapshot)> done) override;
  void Drain(absl::Time deadline, absl::Status why, std::function<void()> idle) override;
  void Resume() override;
  void CancelAll(absl::Status why) override;
  void Wake() override { inbox_.Wake(); }
  Next Turn() override;
  bool WaitForInbox(absl::Time until) override { return inbox_.Wait(until - parts_.clock->Now()); }
  const StepTimes& times() const override { return times_; }

 private:
  // A launched step whose results are not read.
  struct Step {
    absl::Time launched;
    std::vector<Sequence*> sampled;  // in the order of the plan's sampling rows
    std::vector<Sequence*> members;  // every sequence that has a row
  };

  absl::Status CheckRequest(const Request& request) const;
  // Output tokens at most after a prompt that this node computes itself.
  int64_t LocalMaxTokens(int64_t prompt) const;
  // max_tokens and min_tokens against the most that there may be.
  static absl::Status CheckTokens(const SamplingParams& sampling, int64_t most,
                                  const std::string& why);
  // The rules between a request and its manifest.
  static absl::Status CheckManifest(const Request& request, const std::vector<int32_t>& prompt,
                                    uint32_t max_new_tokens);
  // What `prompt` tokens leave for output: whether they do, and whether the request wants more.
  absl::Status CheckPromptFits(const Request& request, size_t prompt) const;
  // Of a Generate and what it is attached to.
  absl::Status CheckAttached(const Request& request, const TransferTable::AttachedInfo& info) const;

  static int BufferOf(uint64_t step) { return static_cast<int>(step % BatchState::kDepth); }
  int steps_under_way() const { return static_cast<int>(launched_steps_ - completed_steps_); }

  // Phases of a turn.
  Next TakeTurn();
  void CheckTimes(absl::Time now);
  // The device has failed: every sequence ends with why, and no other comes. Again in every turn,
  // for what was submitted meanwhile.
  void EndFailed(const absl::Status& health, absl::Time now);
  void TakeReadyTransfers(absl::Time now);
  void ReleaseSlots();
  void MoveOut(absl::Time now);
  void MakeFirm();
  void AdmitWaiting(absl::Time now);
  void EndStarved(absl::Time now);
  bool LaunchStep(absl::Time now);
  void CompleteStep();
  void UpdateGauges();
  // The event that the first slot on its way in or out waits for, or null.
  Event* PendingSlotEvent();

  bool Admit(Sequence& sequence, Promise promise, absl::Time now);
  // Tells the policy, once, when every row of the prompt is computed.
  void EndPromptIfDone(Sequence& sequence);
  void FreeSlot(int slot);
  // Every launched step that has its row is done, and so is every copy of its slot.
  bool SlotAtRest(const Sequence& sequence);
  // What SlotAtRest waits for, where no step is under way.
  Event* SlotEvent(const Sequence& sequence);
  // Makes places for the rows that the next step may give it. False: a page is lacking, and if
  // nobody is on his way out already, the one whose turn it is has been sent.
  bool MakeRoom(Sequence& sequence);
  void Preempt(Sequence& sequence);
  // Into waiting_, by ticket.
  void Enqueue(Sequence& sequence);

  void Add(std::unique_ptr<Sequence> sequence, absl::Time now);
  void BecomeReady(Sequence& sequence, ReadySequence ready, absl::Time now);
  // With nothing handed over: all of the prompt is pending.
  void BecomeReadyWithout(Sequence& sequence, absl::Time now);
  // For one that awaits its transfer, which failed: ends with `why`, or computes its prompt here.
  void EndOrCompute(Sequence& sequence, absl::Status why, absl::Time now);
  // Emits an output token and ends the sequence if it stops there; then the sequence may be gone,
  // and the result is false.
  bool Emit(Sequence& sequence, const OutputToken& token, absl::Time now);
  // Ends all of them.
  void EndAll(const absl::Status& why, absl::Time now);
  void Finish(Sequence& sequence, FinishInfo info, absl::Time now);
  void FinishWith(Sequence& sequence, absl::Status why, absl::Time now);
  // Of a sequence that ends well and is to be kept: mints its name, if there is room for it. Its
  // caches follow when its slot is at rest.
  void Keep(Sequence& sequence);
  void CheckIdle();
  // Tells the trace, if there is one.
  void Trace(const Sequence& sequence, SequenceStage stage, absl::Time at);

  const Options options_;
  const Parts parts_;
  Inbox inbox_;
  Readiness own_readiness_;
  // Drains and resumes under submit_mutex_: every request was submitted before or after.
  Readiness* const readiness_;

  // Shared with Submit.
  absl::Mutex submit_mutex_;
  absl::flat_hash_set<std::string> alive_ids_ ABSL_GUARDED_BY(submit_mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(submit_mutex_) = 1;
  uint32_t waiting_count_ ABSL_GUARDED_BY(submit_mutex_) = 0;  // submitted and not yet admitted
  std::atomic<bool> transfers_changed_{false};

  // Engine's thread.
  const std::unique_ptr<BatchState> batch_;
  const std::unique_ptr<Stream> stream_;
  // In order of arrival: what ends at one time ends in that order, and a run can be repeated.
  absl::btree_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  absl::flat_hash_map<std::string, Sequence*> by_name_;  // request id
  std::vector<Sequence*> awaiting_;                      // for their transfer
  std::deque<Sequence*> waiting_;                        // for room, by ticket
  std::vector<Sequence*> running_;                       // by ticket
  std::vector<Sequence*> preempting_;
  std::vector<std::unique_ptr<Sequence>> leaving_;  // finished, slot still in a launched step
  std::vector<Sequence*> slots_;
  std::vector<int> free_slots_;
  // Step `number` is steps_[number % kDepth]; those after completed_steps_ are under way.
  std::array<Step, BatchState::kDepth> steps_;
  std::vector<PlannerSequence> planner_view_;
  std::vector<WaitingSequence> waiting_view_;
  std::vector<VictimCandidate> victim_view_;
  std::vector<Admission> admissions_;
  int soft_running_ = 0;
  uint64_t next_ticket_ = 1;
  Event* cold_ = nullptr;  // of a slot that was not warm in the newest plan
  StepPlan plan_;
  uint64_t launched_steps_ = 0;
  uint64_t completed_steps_ = 0;
  StepTimes times_;
  absl::Time last_completed_ = absl::InfinitePast();
  absl::Time last_turn_ = absl::InfinitePast();  // its end; kept for a trace alone
  absl::Time next_reap_ = absl::InfinitePast();
  absl::Time next_check_ = absl::InfinitePast();
  SplitMix64 seeds_;
  bool device_failed_ = false;
  absl::Time drain_deadline_ = absl::InfiniteFuture();
  absl::Status drain_why_;
  std::vector<std::function<void()>> idle_callbacks_;
};

}  // namespace sluice
