#include "src/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/engine/batch_state.h"
#include "src/engine/inbox.h"
#include "src/engine/sequence.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/model/token_bytes.h"
#include "src/scheduler/planner.h"

namespace sluice {
namespace {

// When a refused Generate may find a place among those that wait: about the time in which a
// sequence finishes.
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

RequestOutcome OutcomeOf(const FinishInfo& info) {
  switch (info.reason) {
    case FinishInfo::Reason::kStop:
      return RequestOutcome::kFinishedStop;
    case FinishInfo::Reason::kLength:
      return RequestOutcome::kFinishedLength;
    case FinishInfo::Reason::kError:
      break;
  }
  if (absl::IsCancelled(info.status)) return RequestOutcome::kCancelled;
  if (absl::IsDeadlineExceeded(info.status)) return RequestOutcome::kDeadline;
  if (ReasonOf(info.status) == "SLOW_READER") return RequestOutcome::kSlowReader;
  return RequestOutcome::kError;
}

class EngineImpl : public Engine {
 public:
  EngineImpl(const Options& options, const Parts& parts, std::unique_ptr<BatchState> batch)
      : options_(options),
        parts_(parts),
        batch_(std::move(batch)),
        stream_(parts.device->NewStream(Device::StreamKind::kCompute)),
        slots_(options.max_sequences, nullptr),
        seeds_(options.seed != 0 ? options.seed : RandomU64()) {
    for (int slot = static_cast<int>(options.max_sequences) - 1; slot >= 0; --slot) {
      free_slots_.push_back(slot);
    }
    running_.reserve(options.max_sequences);
    planner_view_.reserve(options.max_sequences);
    parts_.transfers->SetWake([this] {
      transfers_changed_.store(true, std::memory_order_release);
      inbox_.Wake();
    });
  }
  ~EngineImpl() override {
    parts_.transfers->SetWake(nullptr);
    SLUICE_CHECK(sequences_.empty() && steps_.empty(),
                 "an engine ends idle: EngineThread sees to it");
  }

  absl::Status Submit(Request request) override;
  void Cancel(const std::string& request_id, absl::Status why,
              std::function<void(bool)> done) override;
  void Snapshot(std::function<void(EngineSnapshot)> done) override;
  void Drain(std::function<void()> idle) override;
  void CancelAll(absl::Status why) override;
  void Wake() override { inbox_.Wake(); }
  Next Turn() override;
  void WaitForInbox(absl::Time until) override { inbox_.Wait(until); }

 private:
  // A launched step whose results are not read.
  struct Step {
    uint64_t number = 0;
    int buffer = 0;
    absl::Time launched;
    std::vector<Sequence*> sampled;  // in the order of the plan's sampling rows
    std::vector<Sequence*> members;  // every sequence that has a row
  };

  absl::Status CheckRequest(const Request& request) const;
  // The rules between a request and its manifest; sets what follows from the latter.
  static absl::Status CheckManifest(const Request& request, const std::vector<int32_t>& prompt,
                                    uint32_t max_new_tokens);

  // Phases of a turn.
  void CheckTimes(absl::Time now);
  void TakeReadyTransfers(absl::Time now);
  void AdmitWaiting(absl::Time now);
  bool LaunchStep(absl::Time now);
  void CompleteStep();
  void ReleaseSlots();
  void UpdateGauges();
  // The event that the first slot on its way in or out waits for, or null.
  Event* PendingSlotEvent();

  void Add(std::unique_ptr<Sequence> sequence, absl::Time now);
  void BecomeReady(Sequence& sequence, ReadySequence ready, absl::Time now);
  // Emits an output token and ends the sequence if it stops there; then the sequence may be gone,
  // and the result is false.
  bool Emit(Sequence& sequence, OutputToken token, absl::Time now);
  void Finish(Sequence& sequence, FinishInfo info, absl::Time now);
  void FinishWith(Sequence& sequence, absl::Status why, absl::Time now);
  void Erase(Sequence& sequence);
  void CheckIdle();

  const Options options_;
  const Parts parts_;
  Inbox inbox_;

  // Shared with Submit.
  absl::Mutex submit_mutex_;
  absl::flat_hash_set<std::string> alive_ids_ ABSL_GUARDED_BY(submit_mutex_);
  uint32_t waiting_count_ ABSL_GUARDED_BY(submit_mutex_) = 0;  // submitted and not yet admitted
  bool draining_ ABSL_GUARDED_BY(submit_mutex_) = false;
  std::atomic<bool> transfers_changed_{false};

  // Engine's thread.
  const std::unique_ptr<BatchState> batch_;
  const std::unique_ptr<Stream> stream_;
  absl::flat_hash_map<std::string, std::unique_ptr<Sequence>> sequences_;  // by request id
  std::vector<Sequence*> awaiting_;                                        // for their transfer
  std::deque<Sequence*> waiting_;                   // for room, in order of arrival
  std::vector<Sequence*> running_;                  // in order of admission
  std::vector<std::unique_ptr<Sequence>> leaving_;  // finished, slot still in a launched step
  std::vector<Sequence*> slots_;
  std::vector<int> free_slots_;
  std::deque<Step> steps_;
  std::vector<Step> spare_steps_;
  std::vector<PlannerSequence> planner_view_;
  Event* cold_ = nullptr;  // of a slot that could not run in the newest plan for it was not warm
  StepPlan plan_;
  uint64_t launched_steps_ = 0;
  uint64_t completed_steps_ = 0;
  absl::Time next_reap_ = absl::InfinitePast();
  absl::Time next_check_ = absl::InfinitePast();
  SplitMix64 seeds_;
  std::vector<std::function<void()>> idle_callbacks_;
};

// ---- From any thread ----

absl::Status EngineImpl::CheckRequest(const Request& request) const {
  const auto vocab = static_cast<uint32_t>(parts_.model->config().vocab_size);
  SLUICE_RETURN_IF_ERROR(
      ValidateSamplingParams(request.sampling, vocab, parts_.token_bytes != nullptr));
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (static_cast<uint32_t>(request.prompt[i]) >= vocab) {
      return InvalidField("prompt_token_ids", absl::StrCat("token ", i, " is ",
                                                           static_cast<uint32_t>(request.prompt[i]),
                                                           ", outside the vocabulary of ", vocab));
    }
  }
  if (!request.handoff.empty()) return absl::OkStatus();
  if (request.prompt.empty()) {
    return InvalidField("prompt_token_ids", "must not be empty where nothing is handed over");
  }
  const size_t prompt = request.prompt.size();
  const uint32_t output = request.sampling.max_tokens.value_or(1);
  if (prompt >= options_.max_context) {
    return InvalidField("prompt_token_ids",
                        absl::StrCat("this node's context is ", options_.max_context,
                                     " tokens and must hold one more, found a prompt of ", prompt));
  }
  if (output > options_.max_context - prompt) {
    return InvalidField(
        "sampling.max_tokens",
        absl::StrCat("the context of ", options_.max_context, " leaves ",
                     options_.max_context - prompt, " after the prompt, found ", output));
  }
  if (!options_.local_prefill && !request.allow_local_prefill) {
    return WithReason(
        absl::FailedPreconditionError(
            "nothing was handed over (no transfer_id, no rendezvous_key), and this node does not "
            "compute prompts: send the caches by KvIngest first, or set local_prefill"),
        "NO_HANDOFF");
  }
  if (!parts_.policy->CouldEverFit(0, static_cast<int64_t>(prompt) + output)) {
    return InvalidField("sampling.max_tokens",
                        "prompt and output need more HBM than this node has; shorten them, or "
                        "raise --hbm-bytes");
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::CheckManifest(const Request& request, const std::vector<int32_t>& prompt,
                                       uint32_t max_new_tokens) {
  if (!request.prompt.empty() && request.prompt != prompt) {
    return InvalidField("prompt_token_ids",
                        "differs from the manifest's; leave it empty with a handoff");
  }
  if (request.sampling.max_tokens.value_or(1) > max_new_tokens) {
    return InvalidField("sampling.max_tokens",
                        absl::StrCat("the transfer reserved max_new_tokens = ", max_new_tokens,
                                     ", found ", *request.sampling.max_tokens));
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::Submit(Request request) {
  SLUICE_RETURN_IF_ERROR(CheckRequest(request));
  absl::MutexLock lock(&submit_mutex_);
  if (draining_) {
    return WithReason(absl::UnavailableError("this node is draining; send the request elsewhere"),
                      "DRAINING");
  }
  if (waiting_count_ >= options_.max_waiting) {
    return ResourceExhausted(
        "TOO_MANY_WAITING",
        absl::StrCat(waiting_count_, " sequences wait already; try again later"), kRetryAfter);
  }
  if (alive_ids_.contains(request.request_id)) {
    return WithReason(
        absl::AlreadyExistsError(absl::StrCat("request_id '", request.request_id, "' is alive")),
        "REQUEST_ID_IN_USE");
  }
  std::optional<TransferTable::AttachId> attached;
  if (!request.handoff.empty()) {
    SLUICE_ASSIGN_OR_RETURN(attached, parts_.transfers->Attach(request.handoff));
    if (const auto info = parts_.transfers->Info(*attached); info.has_value()) {
      absl::Status status = CheckManifest(request, info->prompt, info->max_new_tokens);
      if (!status.ok()) {
        parts_.transfers->Detach(*attached, /*abort_transfer=*/false);
        return status;
      }
    }
  }
  alive_ids_.insert(request.request_id);
  ++waiting_count_;

  std::vector<int32_t> stop_ids;
  if (!request.sampling.ignore_eos) stop_ids = parts_.model->config().eos_token_ids;
  for (const uint32_t id : request.sampling.stop_token_ids) {
    stop_ids.push_back(static_cast<int32_t>(id));
  }
  std::sort(stop_ids.begin(), stop_ids.end());
  stop_ids.erase(std::unique(stop_ids.begin(), stop_ids.end()), stop_ids.end());
  StopConditions stops(std::move(stop_ids), request.sampling.stop, request.sampling.min_tokens);
  // std::function wants to be copied; the sequence is handed on once.
  auto sequence = std::make_shared<std::unique_ptr<Sequence>>(
      std::make_unique<Sequence>(std::move(request), std::move(stops)));
  (*sequence)->attached = attached;
  inbox_.Post([this, sequence] { Add(std::move(*sequence), parts_.clock->Now()); });
  return absl::OkStatus();
}

void EngineImpl::Cancel(const std::string& request_id, absl::Status why,
                        std::function<void(bool)> done) {
  inbox_.Post([this, request_id, why = std::move(why), done = std::move(done)] {
    const auto it = sequences_.find(request_id);
    const bool found = it != sequences_.end();
    if (found) FinishWith(*it->second, why, parts_.clock->Now());
    if (done != nullptr) done(found);
  });
}

void EngineImpl::Snapshot(std::function<void(EngineSnapshot)> done) {
  inbox_.Post([this, done = std::move(done)] {
    EngineSnapshot snapshot;
    {
      absl::MutexLock lock(&submit_mutex_);
      snapshot.draining = draining_;
    }
    const absl::Time now = parts_.clock->Now();
    snapshot.running = static_cast<uint32_t>(running_.size());
    snapshot.waiting = static_cast<uint32_t>(awaiting_.size() + waiting_.size());
    for (const auto& [id, sequence] : sequences_) {
      using State = SequenceSnapshot::State;
      SequenceSnapshot s;
      s.request_id = id;
      s.transfer_id = sequence->transfer_id;
      s.state = sequence->state == Sequence::State::kAwaitingTransfer ? State::kAwaitingTransfer
                : sequence->state == Sequence::State::kWaiting        ? State::kWaiting
                : sequence->parked_since.has_value()                  ? State::kParked
                                                                      : State::kRunning;
      s.prompt_tokens = static_cast<uint32_t>(sequence->prompt_length);
      s.output_tokens = static_cast<uint32_t>(sequence->emitted);
      s.max_tokens = static_cast<uint32_t>(sequence->max_tokens);
      s.age = now - sequence->arrival;
      snapshot.sequences.push_back(std::move(s));
    }
    done(std::move(snapshot));
  });
}

void EngineImpl::Drain(std::function<void()> idle) {
  {
    absl::MutexLock lock(&submit_mutex_);
    draining_ = true;
  }
  inbox_.Post([this, idle = std::move(idle)] {
    if (idle != nullptr) idle_callbacks_.push_back(idle);
  });
}

void EngineImpl::CancelAll(absl::Status why) {
  inbox_.Post([this, why = std::move(why)] {
    const absl::Time now = parts_.clock->Now();
    std::vector<Sequence*> all;
    for (const auto& [id, sequence] : sequences_) all.push_back(sequence.get());
    for (Sequence* sequence : all) FinishWith(*sequence, why, now);
  });
}

// ---- Turn ----

Engine::Next EngineImpl::Turn() {
  inbox_.Drain();
  const absl::Time now = parts_.clock->Now();
  if (now >= next_reap_ || transfers_changed_.load(std::memory_order_acquire)) {
    TakeReadyTransfers(now);
  }
  if (now >= next_check_) CheckTimes(now);
  ReleaseSlots();
  AdmitWaiting(now);
  UpdateGauges();

  const bool launched = steps_.size() < BatchState::kDepth && LaunchStep(now);
  if (steps_.size() == BatchState::kDepth || (!steps_.empty() && !launched)) {
    Event& event = batch_->event(steps_.front().buffer);
    if (!event.Ready()) return {Next::Kind::kEvent, &event, {}};
    CompleteStep();
    return {Next::Kind::kNow, nullptr, {}};
  }
  if (launched) return {Next::Kind::kNow, nullptr, {}};
  // Nothing is launched: what has a slot is parked, or on its way in or out.
  if (Event* event = PendingSlotEvent(); event != nullptr) return {Next::Kind::kEvent, event, {}};
  CheckIdle();
  return {Next::Kind::kInbox, nullptr, std::min(next_reap_, next_check_)};
}

void EngineImpl::Add(std::unique_ptr<Sequence> owned, absl::Time now) {
  Sequence& sequence = *owned;
  sequence.arrival = now;
  sequences_.emplace(sequence.request.request_id, std::move(owned));
  next_check_ = absl::InfinitePast();
  if (sequence.attached.has_value()) {
    sequence.state = Sequence::State::kAwaitingTransfer;
    sequence.give_up = now + options_.transfer_wait;
    awaiting_.push_back(&sequence);
    transfers_changed_.store(true, std::memory_order_release);
    return;
  }
  ReadySequence ready;
  ready.prompt = sequence.request.prompt;
  ready.max_new_tokens =
      static_cast<uint32_t>(options_.max_context - sequence.request.prompt.size());
  BecomeReady(sequence, std::move(ready), now);
}

void EngineImpl::TakeReadyTransfers(absl::Time now) {
  // Cleared first: what changes meanwhile is seen in the next turn.
  transfers_changed_.store(false, std::memory_order_release);
  uint64_t expired = 0;
  next_reap_ = parts_.transfers->Reap(&expired);
  if (expired > 0 && parts_.metrics != nullptr) {
    parts_.metrics->leases_expired.Add(static_cast<double>(expired));
  }
  const std::vector<Sequence*> awaiting = awaiting_;  // finishing one changes the list
  for (Sequence* sequence : awaiting) {
    absl::StatusOr<std::optional<ReadySequence>> ready =
        parts_.transfers->TakeReady(*sequence->attached);
    if (ready.ok() && !ready->has_value()) continue;
    sequence->attached.reset();
    if (!ready.ok()) {
      FinishWith(*sequence, ready.status(), now);
      continue;
    }
    absl::Status status =
        CheckManifest(sequence->request, (*ready)->prompt, (*ready)->max_new_tokens);
    if (!status.ok()) {
      FinishWith(*sequence, std::move(status), now);
      continue;
    }
    awaiting_.erase(std::find(awaiting_.begin(), awaiting_.end(), sequence));
    BecomeReady(*sequence, **std::move(ready), now);
  }
}

void EngineImpl::BecomeReady(Sequence& sequence, ReadySequence ready, absl::Time now) {
  sequence.state = Sequence::State::kWaiting;
  sequence.give_up = absl::InfiniteFuture();
  sequence.transfer_id = std::move(ready.transfer_id);
  sequence.home = std::move(ready.home);
  sequence.tokens = std::move(ready.prompt);
  sequence.prompt_length = static_cast<int64_t>(sequence.tokens.size());
  sequence.context_length = ready.context_length;
  sequence.max_tokens = sequence.request.sampling.max_tokens.value_or(ready.max_new_tokens);
  sequence.last_emit = sequence.arrival;
  waiting_.push_back(&sequence);
  if (parts_.metrics != nullptr) {
    parts_.metrics->tokens(TokenKind::kHandedOver).Add(static_cast<double>(ready.context_length));
  }
  // The handoff's first tokens are pending, and the caller's before anything is computed.
  for (OutputToken& token : ready.first_tokens) {
    sequence.tokens.push_back(token.id);
    if (!sequence.request.sampling.logprobs.has_value()) {
      token.logprob.reset();
      token.top_logprobs.clear();
    }
    if (!Emit(sequence, std::move(token), now)) return;
  }
  sequence.length = static_cast<int64_t>(sequence.tokens.size());
  // A cache that covers every token recomputes the last one, whose logits choose the next.
  sequence.cached = std::min(sequence.context_length, sequence.length - 1);
}

void EngineImpl::CheckTimes(absl::Time now) {
  absl::Time next = absl::InfiniteFuture();
  std::vector<std::pair<Sequence*, absl::Status>> over;
  for (const auto& [id, sequence] : sequences_) {
    const absl::Time deadline = sequence->request.deadline;
    const absl::Time slow = sequence->parked_since.has_value()
                                ? *sequence->parked_since + options_.slow_reader_timeout
                                : absl::InfiniteFuture();
    if (deadline <= now) {
      over.emplace_back(sequence.get(),
                        absl::DeadlineExceededError("the request's deadline passed"));
    } else if (sequence->give_up <= now) {
      over.emplace_back(sequence.get(),
                        WithReason(absl::DeadlineExceededError(
                                       absl::StrCat("its transfer was not complete within ",
                                                    absl::FormatDuration(options_.transfer_wait))),
                                   "TRANSFER_WAIT"));
    } else if (slow <= now) {
      if (parts_.metrics != nullptr) parts_.metrics->slow_readers.Add();
      over.emplace_back(sequence.get(),
                        WithReason(absl::AbortedError(absl::StrCat(
                                       "the stream was not read for ",
                                       absl::FormatDuration(options_.slow_reader_timeout))),
                                   "SLOW_READER"));
    } else {
      next = std::min({next, deadline, sequence->give_up, slow});
    }
  }
  next_check_ = next;
  for (auto& [sequence, why] : over) FinishWith(*sequence, std::move(why), now);
}

void EngineImpl::AdmitWaiting(absl::Time now) {
  // First come, first served: a large sequence at the head is not overtaken for ever by small ones.
  while (!waiting_.empty() && !free_slots_.empty()) {
    Sequence& sequence = *waiting_.front();
    const int slot = free_slots_.back();
    if (!parts_.policy->Admit(slot, sequence.context_length, sequence.total(), sequence.home))
      return;
    waiting_.pop_front();
    free_slots_.pop_back();
    slots_[static_cast<size_t>(slot)] = &sequence;
    sequence.slot = slot;
    sequence.state = Sequence::State::kRunning;
    sequence.admitted = now;
    sequence.last_step = launched_steps_;
    running_.push_back(&sequence);
    batch_->Join(*stream_, slot, sequence.tokens, sequence.request.sampling, seeds_(),
                 static_cast<int32_t>(sequence.prompt_length), sequence.stops.stop_ids());
    {
      absl::MutexLock lock(&submit_mutex_);
      --waiting_count_;
    }
    if (parts_.metrics != nullptr) parts_.metrics->queue_seconds.Observe(now - sequence.arrival);
  }
}

bool EngineImpl::LaunchStep(absl::Time now) {
  planner_view_.clear();
  cold_ = nullptr;
  for (Sequence* sequence : running_) {
    const bool room = sequence->request.sink->HasRoom(static_cast<size_t>(sequence->in_flight) + 1);
    const bool work = sequence->cached < sequence->length && sequence->wants_token();
    if (room) {
      sequence->parked_since.reset();
    } else if (work && !sequence->parked_since.has_value()) {
      sequence->parked_since = now;
      next_check_ = std::min(next_check_, now + options_.slow_reader_timeout);
    }
    PlannerSequence view;
    view.slot = sequence->slot;
    view.cached = sequence->cached;
    view.length = sequence->length;
    view.wants_token = sequence->wants_token();
    view.runnable = room && work && parts_.policy->Warm(sequence->slot);
    if (room && work && !view.runnable) cold_ = &parts_.policy->WarmEvent(sequence->slot);
    planner_view_.push_back(view);
  }
  PlanStep({parts_.model->max_rows(), static_cast<int32_t>(options_.chunk_tokens)}, planner_view_,
           &plan_);
  if (plan_.rows.empty()) return false;

  Step step;
  if (!spare_steps_.empty()) {
    step = std::move(spare_steps_.back());
    spare_steps_.pop_back();
  }
  step.number = ++launched_steps_;
  step.buffer = static_cast<int>(step.number % BatchState::kDepth);
  step.launched = now;
  step.sampled.clear();
  step.members.clear();
  for (const PlanRow& row : plan_.rows) {
    Sequence& sequence = *slots_[static_cast<size_t>(row.slot)];
    parts_.policy->Grow(row.slot, row.first_position + row.count, *stream_);
    sequence.cached += row.count;
    sequence.last_step = step.number;
    ++sequence.in_flight;
    step.members.push_back(&sequence);
    if (row.sample) {
      ++sequence.length;
      step.sampled.push_back(&sequence);
    }
  }
  const absl::Time planned = parts_.clock->Now();
  batch_->Launch(*stream_, step.buffer, plan_, *parts_.model, *parts_.policy);
  steps_.push_back(std::move(step));
  if (parts_.metrics != nullptr) {
    parts_.metrics->step_sequences.Observe(static_cast<double>(plan_.rows.size()));
    parts_.metrics->step_seconds(StepPhase::kPlan).Observe(planned - now);
    const int64_t pending = plan_.row_count - static_cast<int64_t>(plan_.sample_count);
    if (pending > 0) parts_.metrics->tokens(TokenKind::kPrompt).Add(static_cast<double>(pending));
  }
  return true;
}

void EngineImpl::CompleteStep() {
  Step step = std::move(steps_.front());
  steps_.pop_front();
  completed_steps_ = step.number;
  const absl::Time now = parts_.clock->Now();
  for (Sequence* sequence : step.members) --sequence->in_flight;
  for (size_t i = 0; i < step.sampled.size(); ++i) {
    Sequence& sequence = *step.sampled[i];
    // Stopped a step ago: this token is surplus, and its KV goes with the sequence's pages.
    if (sequence.state == Sequence::State::kFinished) continue;
    OutputToken token =
        batch_->Result(step.buffer, static_cast<int>(i), sequence.request.sampling.logprobs);
    if (token.id < 0) {
      FinishWith(sequence,
                 WithReason(absl::InternalError("the model's logits are not finite"), "BAD_LOGITS"),
                 now);
      continue;
    }
    Emit(sequence, std::move(token), now);
  }
  if (parts_.metrics != nullptr) {
    const absl::Time end = parts_.clock->Now();
    parts_.metrics->step_seconds(StepPhase::kCompute).Observe(now - step.launched);
    parts_.metrics->step_seconds(StepPhase::kEmit).Observe(end - now);
    parts_.metrics->step_seconds(StepPhase::kTotal).Observe(end - step.launched);
  }
  spare_steps_.push_back(std::move(step));
}

bool EngineImpl::Emit(Sequence& sequence, OutputToken token, absl::Time now) {
  const int32_t id = token.id;
  ++sequence.emitted;
  if (parts_.metrics != nullptr) {
    if (sequence.emitted == 1) {
      parts_.metrics->time_to_first_token.Observe(now - sequence.arrival);
    } else {
      parts_.metrics->inter_token_latency.Observe(now - sequence.last_emit);
    }
    parts_.metrics->tokens(TokenKind::kOutput).Add();
  }
  sequence.last_emit = now;
  sequence.request.sink->Emit(std::move(token));
  const std::string* bytes =
      parts_.token_bytes != nullptr ? &parts_.token_bytes->Bytes(id) : nullptr;
  if (auto match = sequence.stops.Take(id, bytes); match.has_value()) {
    FinishInfo info;
    info.reason = FinishInfo::Reason::kStop;
    info.stop_token_id = match->token_id;
    info.stop_string = match->text;
    Finish(sequence, std::move(info), now);
    return false;
  }
  if (sequence.emitted < sequence.max_tokens) return true;
  FinishInfo info;
  info.reason = FinishInfo::Reason::kLength;
  Finish(sequence, std::move(info), now);
  return false;
}

void EngineImpl::FinishWith(Sequence& sequence, absl::Status why, absl::Time now) {
  FinishInfo info;
  info.reason = FinishInfo::Reason::kError;
  info.status = std::move(why);
  Finish(sequence, std::move(info), now);
}

void EngineImpl::Finish(Sequence& sequence, FinishInfo info, absl::Time now) {
  SLUICE_CHECK(sequence.state != Sequence::State::kFinished, "a sequence ends exactly once");
  info.prompt_tokens = static_cast<uint32_t>(sequence.prompt_length);
  info.completion_tokens = static_cast<uint32_t>(sequence.emitted);
  info.cached_tokens = static_cast<uint32_t>(sequence.context_length);
  if (parts_.metrics != nullptr) {
    parts_.metrics->requests(OutcomeOf(info)).Add();
    parts_.metrics->request_seconds.Observe(now - sequence.arrival);
  }
  const bool had_slot = sequence.state == Sequence::State::kRunning;
  if (sequence.attached.has_value()) {
    parts_.transfers->Detach(*sequence.attached, /*abort_transfer=*/true);
  }
  std::erase(awaiting_, &sequence);
  std::erase(waiting_, &sequence);
  std::erase(running_, &sequence);
  sequence.state = Sequence::State::kFinished;
  const std::shared_ptr<TokenSink> sink = std::move(sequence.request.sink);
  const auto it = sequences_.find(sequence.request.request_id);
  std::unique_ptr<Sequence> owned = std::move(it->second);
  sequences_.erase(it);
  {
    absl::MutexLock lock(&submit_mutex_);
    alive_ids_.erase(sequence.request.request_id);
    if (!had_slot) --waiting_count_;
  }
  // A launched step may still point to it: it goes in ReleaseSlots, between turns' phases.
  if (had_slot) leaving_.push_back(std::move(owned));
  sink->Finish(std::move(info));
}

void EngineImpl::ReleaseSlots() {
  std::erase_if(leaving_, [this](const std::unique_ptr<Sequence>& sequence) {
    if (sequence->last_step > completed_steps_ || !parts_.policy->Warm(sequence->slot) ||
        !batch_->joined(sequence->slot).Ready()) {
      return false;
    }
    parts_.policy->Release(sequence->slot);
    slots_[static_cast<size_t>(sequence->slot)] = nullptr;
    free_slots_.push_back(sequence->slot);
    return true;
  });
}

Event* EngineImpl::PendingSlotEvent() {
  // What planning saw, not what is so now: a slot that became warm in between has its step to come.
  if (cold_ != nullptr) return cold_;
  for (const auto& sequence : leaving_) {
    Event& joined = batch_->joined(sequence->slot);
    return joined.Ready() ? &parts_.policy->WarmEvent(sequence->slot) : &joined;
  }
  return nullptr;
}

void EngineImpl::UpdateGauges() {
  if (parts_.metrics == nullptr) return;
  parts_.metrics->SetRunning(static_cast<double>(running_.size()));
  parts_.metrics->waiting.Set(static_cast<double>(awaiting_.size() + waiting_.size()));
}

void EngineImpl::CheckIdle() {
  if (idle_callbacks_.empty() || !sequences_.empty() || !leaving_.empty()) return;
  {
    absl::MutexLock lock(&submit_mutex_);
    if (!alive_ids_.empty()) return;  // submitted, still in the inbox
  }
  std::vector<std::function<void()>> callbacks;
  callbacks.swap(idle_callbacks_);
  for (const auto& callback : callbacks) callback();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Options& options, const Parts& parts) {
  SLUICE_CHECK(options.max_context > 0 &&
               options.max_context <= static_cast<uint32_t>(parts.model->max_context()));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<BatchState> batch,
                          BatchState::Create({static_cast<int>(options.max_sequences),
                                              static_cast<int>(options.max_context)},
                                             parts.device, *parts.model));
  return std::make_unique<EngineImpl>(options, parts, std::move(batch));
}

}  // namespace sluice
