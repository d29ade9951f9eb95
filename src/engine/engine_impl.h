// The engine's implementation class. Its functions are in engine.cc (what any thread may call),
// turn.cc (the phases of a turn), placement.cc (how sequences enter the batch, leave it and come
// back), prefix_reuse.cc (blocks that they share), speculation.cc (drafts) and sequence_life.cc
// (how a sequence arrives, emits and ends). Functions and members belong to the engine's thread
// unless they say otherwise.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
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
#include "src/engine/draft_limit.h"
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
  // A launched step whose results are not read yet.
  struct Step {
    // A sequence for which the step chooses tokens: the next one, and one behind each draft.
    struct Sampled {
      Sequence* sequence;
      int first;   // index of its first result
      int drafts;  // of the sequence's `drafts`, from the first on
    };
    absl::Time launched;
    std::vector<Sampled> sampled;    // in the order of the plan's sampling rows
    std::vector<Sequence*> members;  // every sequence that has a row
    bool drafts = false;             // whether a row is a draft
    bool decodes = false;            // whether all rows choose tokens
    int draft_limit = 0;             // drafts that a sequence might bring
    int running = 0;                 // sequences in the batch, by whose number the limit goes
  };

  absl::Status CheckRequest(const Request& request) const;
  // Returns the maximum output tokens after a prompt that this node computes itself.
  int64_t LocalMaxTokens(int64_t prompt) const;
  // Checks max_tokens and min_tokens against `most`, the maximum that `why` explains.
  static absl::Status CheckTokens(const SamplingParams& sampling, int64_t most,
                                  const std::string& why);
  // Checks the rules between a request and its manifest.
  static absl::Status CheckManifest(const Request& request, const std::vector<int32_t>& prompt,
                                    uint32_t max_new_tokens);
  // Logs and counts a prompt that is computed here because its caches did not arrive.
  void NoteLocalPrefill(const Request& request, const std::string& error);
  // Returns whether this node computes a prompt for which the request names no caches.
  bool ComputesPromptOf(const Request& request) const;
  // Checks that `prompt` tokens leave space for output, and that the request does not want more
  // output than they leave.
  absl::Status CheckPromptFits(const Request& request, size_t prompt) const;
  // Checks a Generate against what it is attached to.
  absl::Status CheckAttached(const Request& request, const TransferTable::AttachedInfo& info) const;

  static int BufferOf(uint64_t step) { return static_cast<int>(step % BatchState::kDepth); }
  int steps_under_way() const { return static_cast<int>(launched_steps_ - completed_steps_); }

  // The phases of a turn.
  Next TakeTurn();
  void CheckTimes(absl::Time now);
  // Ends every sequence with `health`, because the device has failed, and accepts no other. Every
  // turn does so again, for requests that were submitted meanwhile.
  void EndFailed(const absl::Status& health, absl::Time now);
  void TakeReadyTransfers(absl::Time now);
  void ReleaseSlots();
  void MoveOut(absl::Time now);
  void MakeFirm();
  void AdmitWaiting(absl::Time now);
  void EndStarved(absl::Time now);
  bool LaunchStep(absl::Time now);
  // Returns the sequence as the next step's plan sees it.
  PlannerSequence ViewOf(Sequence& sequence, absl::Time now);
  // Puts the plan's rows into the step, and counts their tokens in the sequences.
  void EnterStep(uint64_t number, Step* step);
  void CompleteStep();
  // Emits the tokens that a completed step chose for a sequence, up to the first that refutes a
  // draft.
  void EmitResults(const Step::Sampled& sampled, int buffer, absl::Time now);
  void CountStep(const Step& step, int buffer, absl::Time now);

  // Speculation (speculation.cc).
  // Returns whether the next step must wait for the results of those under way.
  bool MustReadFirst();
  // Returns how many drafts each sequence may bring to the next step.
  int DraftsNow() const;
  // Tells draft_limit_ of a step that ended at `now`.
  void LearnLimit(const Step& step, absl::Time now);
  // Returns how many drafts the sequence may have behind its next token.
  int MostDrafts(const Sequence& sequence) const;
  // Asks for drafts of a runnable sequence, for which it makes rows writable, and returns how many
  // there are.
  int32_t Draft(Sequence& sequence);
  // Tells the sequence's drafter what the device drafted behind the last token, which the plan's
  // sample number `index` chose, if the device drafts.
  void LearnDrafts(Sequence& sequence, int buffer, int index);
  // Fills row_tokens_ for the plan.
  void FillRowTokens();
  void UpdateGauges();
  // Returns the event that the first slot on its way in or out waits for, or null.
  Event* PendingSlotEvent();

  bool Admit(Sequence& sequence, const Admission& admission, absl::Time now);
  // Has the policy admit the sequence to `slot`, with the beginning of its prompt that is known, if
  // one is, on the rank that knows it, and else on the rank that the plan says.
  bool Place(Sequence& sequence, int slot, const Admission& admission);
  // Returns the rank that has the sequence, or its host cache.
  int RankOf(const Sequence& sequence) const;
  // Returns whether a sequence of the rank is on its way out.
  bool GivesBackOn(int rank) const;

  // Sharing of blocks between sequences (prefix_reuse.cc).
  // Gives a sequence that has no caches those of its longest known prefix, as if they had been
  // handed over. Returns whether there is one.
  bool TakePrefix(Sequence& sequence);
  // Counts the tokens of a prompt for which caches were looked up, and those that were found.
  void CountReuse(int64_t asked, int64_t found) const;
  // Undoes TakePrefix, for a sequence that could not be admitted.
  void LeavePrefix(Sequence& sequence);
  // Lets others share what was handed over, before the policy has it.
  void ShareHandedOver(Sequence& sequence);
  // Lets others share a prompt that this node has computed into the host cache.
  void SharePrompt(Sequence& sequence);
  // Publishes the first `tokens` tokens of a sequence that goes on to read `cache`.
  void Publish(Sequence& sequence, int64_t tokens, SequenceCache& cache);
  // Lets others find what a sequence has published, because it has got a token from it.
  void ProvePrefix(Sequence& sequence);
  // Lets nobody find any more what a sequence has read, because something of it is bad.
  void ForgetPrefix(Sequence& sequence);
  // Decides whether a sequence that ends leaves its blocks to others, and reserves what that takes.
  void PlanShare(Sequence& sequence, const FinishInfo& info);
  static absl::Span<const int32_t> FirstTokens(const Sequence& sequence, int64_t count) {
    return absl::MakeConstSpan(sequence.tokens).subspan(0, static_cast<size_t>(count));
  }
  // Tells the policy once, when every row of the prompt is computed.
  void EndPromptIfDone(Sequence& sequence);
  void FreeSlot(int slot);
  // Returns whether every launched step that has the sequence's row is done, and so is every copy
  // of its slot.
  bool SlotAtRest(const Sequence& sequence);
  // Returns the event that SlotAtRest waits for when no step is under way.
  Event* SlotEvent(const Sequence& sequence);
  // Makes the rows writable that the next step may give the sequence. Returns false if a page is
  // lacking; then, if no sequence is on its way out already, the one whose turn it is has been
  // preempted.
  bool GrowOrPreempt(Sequence& sequence);
  void Preempt(Sequence& sequence);
  // Puts the sequence into waiting_, by ticket.
  void Enqueue(Sequence& sequence);

  void Add(std::unique_ptr<Sequence> sequence, absl::Time now);
  void BecomeReady(Sequence& sequence, ReadySequence ready, absl::Time now);
  // Makes the sequence ready with nothing handed over: all of its prompt is pending.
  void BecomeReadyWithout(Sequence& sequence, absl::Time now);
  // Handles a failed transfer of a sequence that awaits it: ends the sequence with `why`, or
  // computes its prompt here.
  void EndOrCompute(Sequence& sequence, absl::Status why, absl::Time now);
  // Emits an output token, and ends the sequence if it stops there. Returns false in that case; the
  // sequence may be gone then. `exact`: it was computed with attention to everything.
  bool Emit(Sequence& sequence, const OutputToken& token, bool exact, absl::Time now);
  // Ends all sequences.
  void EndAll(const absl::Status& why, absl::Time now);
  void Finish(Sequence& sequence, FinishInfo info, absl::Time now);
  void FinishWith(Sequence& sequence, absl::Status why, absl::Time now);
  // Mints the name of a sequence that ends well and is to be kept, if there is capacity for it. Its
  // caches follow when its slot is at rest.
  void Keep(Sequence& sequence);
  void CheckIdle();
  // Tells the trace, if there is one.
  void Trace(const Sequence& sequence, SequenceStage stage, absl::Time at);

  const Options options_;
  const Parts parts_;
  Inbox inbox_;
  Readiness own_readiness_;
  // Drains and resumes under submit_mutex_, so that every request was submitted before or after.
  Readiness* const readiness_;

  // Shared with Submit.
  absl::Mutex submit_mutex_;
  absl::flat_hash_set<std::string> alive_ids_ ABSL_GUARDED_BY(submit_mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(submit_mutex_) = 1;
  uint32_t waiting_count_ ABSL_GUARDED_BY(submit_mutex_) = 0;  // submitted and not yet admitted
  std::atomic<bool> transfers_changed_{false};

  // Members of the engine's thread.
  const std::unique_ptr<BatchState> batch_;
  const std::unique_ptr<Stream> stream_;
  // In order of arrival: sequences that end at one time end in that order, so a run can be
  // repeated.
  absl::btree_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  absl::flat_hash_map<std::string, Sequence*> by_name_;  // by request id
  std::vector<Sequence*> awaiting_;                      // awaiting their transfer
  std::deque<Sequence*> waiting_;                        // waiting for capacity, by ticket
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
  std::vector<AdmissionHeadroom> headroom_;  // of the newest plan, by rank
  int soft_running_ = 0;
  uint64_t next_ticket_ = 1;
  Event* cold_ = nullptr;  // event of a slot that was not warm in the newest plan
  StepPlan plan_;
  std::vector<int32_t> row_tokens_;        // of plan_, where there is a drafter
  std::vector<int32_t> learnt_;            // scratch of LearnDrafts
  std::optional<DraftLimit> draft_limit_;  // null: always options_.draft_tokens
  std::vector<int> accepted_;  // sequences of the step whose draft was accepted, by position
  uint64_t launched_steps_ = 0;
  uint64_t completed_steps_ = 0;
  StepTimes times_;
  absl::Time last_completed_ = absl::InfinitePast();
  absl::Time last_turn_ = absl::InfinitePast();  // end of the last turn; kept only for a trace
  absl::Time next_reap_ = absl::InfinitePast();
  absl::Time next_check_ = absl::InfinitePast();
  SplitMix64 seeds_;
  bool device_failed_ = false;
  absl::Time drain_deadline_ = absl::InfiniteFuture();
  absl::Status drain_why_;
  std::vector<std::function<void()>> idle_callbacks_;
};

}  // namespace sluice
