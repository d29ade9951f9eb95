// The phases of a turn: times, transfers, launch, results. Slots are handled in placement.cc.
#include <algorithm>
#include <utility>

#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"
#include "src/engine/turn_trace.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"

namespace sluice {
namespace {

// While nothing is launched and a slot's copy is under way, the inbox is polled this often.
constexpr absl::Duration kSlotLookAgain = absl::Microseconds(250);

}  // namespace

Engine::Next EngineImpl::Turn() {
  const absl::Time begin = parts_.clock->Now();
  const Next next = TakeTurn();
  const absl::Time end = parts_.clock->Now();
  times_.turn += end - begin;
  if (parts_.trace != nullptr) {
    if (last_turn_ != absl::InfinitePast()) parts_.trace->Phase("wait", last_turn_, begin);
    parts_.trace->Phase("turn", begin, end);
    last_turn_ = end;
  }
  return next;
}

Engine::Next EngineImpl::TakeTurn() {
  inbox_.Drain();
  const absl::Time now = parts_.clock->Now();
  if (const absl::Status health = parts_.device->Health(); !health.ok()) EndFailed(health, now);
  if (now >= next_reap_ || transfers_changed_.load(std::memory_order_acquire)) {
    TakeReadyTransfers(now);
  }
  if (now >= next_check_) CheckTimes(now);
  ReleaseSlots();
  MoveOut(now);
  MakeFirm();
  AdmitWaiting(now);
  EndStarved(now);
  UpdateGauges();

  const bool launched =
      steps_under_way() < BatchState::kDepth && !MustReadFirst() && LaunchStep(now);
  if (steps_under_way() == BatchState::kDepth || (steps_under_way() > 0 && !launched)) {
    Event& event = batch_->event(BufferOf(completed_steps_ + 1));
    if (!event.Ready()) return {Next::Kind::kEvent, &event, absl::InfiniteFuture()};
    // Results of a failed device must not become tokens, so its sequences end first.
    if (!device_failed_ && !parts_.device->Health().ok()) return {Next::Kind::kNow, nullptr, {}};
    CompleteStep();
    return {Next::Kind::kNow, nullptr, {}};
  }
  if (launched) return {Next::Kind::kNow, nullptr, {}};
  // Nothing is launched: every sequence with a slot is parked, or on its way in or out.
  if (Event* event = PendingSlotEvent(); event != nullptr) {
    return {Next::Kind::kEvent, event, now + kSlotLookAgain};
  }
  CheckIdle();
  return {Next::Kind::kInbox, nullptr, std::min(next_reap_, next_check_)};
}

void EngineImpl::EndFailed(const absl::Status& health, absl::Time now) {
  device_failed_ = true;
  readiness_->SetFailed(health);  // nothing is submitted after this
  EndAll(health, now);
}

void EngineImpl::TakeReadyTransfers(absl::Time now) {
  // Cleared first, so that the next turn sees what changes meanwhile.
  transfers_changed_.store(false, std::memory_order_release);
  uint64_t expired = 0;
  // The table is reaped this often even if nothing signals a change: see Inbox::Wait.
  next_reap_ = std::min(parts_.transfers->Reap(&expired), now + Inbox::kLookAgain);
  if (expired > 0) parts_.metrics->leases_expired.Add(static_cast<double>(expired));
  // copied, because finishing a sequence changes the list
  const std::vector<Sequence*> awaiting = awaiting_;
  for (Sequence* sequence : awaiting) {
    absl::StatusOr<std::optional<ReadySequence>> ready =
        parts_.transfers->TakeReady(*sequence->attached);
    if (ready.ok() && !ready->has_value()) continue;
    sequence->attached.reset();
    if (!ready.ok()) {
      EndOrCompute(*sequence, ready.status(), now);
      continue;
    }
    if ((*ready)->kept) {  // a kept sequence was checked when it was submitted
      std::vector<int32_t>& tokens = (*ready)->prompt;
      const std::vector<int32_t>& appended = sequence->request.prompt;
      tokens.insert(tokens.end(), appended.begin(), appended.end());
      (*ready)->max_new_tokens =
          static_cast<uint32_t>(LocalMaxTokens(static_cast<int64_t>(tokens.size())));
    } else if (absl::Status status =
                   CheckManifest(sequence->request, (*ready)->prompt, (*ready)->max_new_tokens);
               !status.ok()) {
      FinishWith(*sequence, std::move(status), now);
      continue;
    }
    awaiting_.erase(std::find(awaiting_.begin(), awaiting_.end(), sequence));
    BecomeReady(*sequence, **std::move(ready), now);
  }
}

void EngineImpl::CheckTimes(absl::Time now) {
  if (drain_deadline_ <= now) {
    drain_deadline_ = absl::InfiniteFuture();
    EndAll(drain_why_, now);
  }
  absl::Time next = drain_deadline_;
  std::vector<std::pair<Sequence*, absl::Status>> over;
  for (const auto& [id, sequence] : sequences_) {
    const absl::Time deadline = sequence->request.deadline;
    // A reader may have freed space since the batch asked, or while its sequence was preempted.
    if (sequence->parked_since.has_value() &&
        sequence->request.sink->HasRoom(static_cast<size_t>(sequence->in_flight) + 1)) {
      sequence->parked_since.reset();
    }
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
                                   reasons::kTransferWait));
    } else if (slow <= now) {
      parts_.metrics->slow_readers.Add();
      over.emplace_back(sequence.get(),
                        WithReason(absl::AbortedError(absl::StrCat(
                                       "the stream was not read for ",
                                       absl::FormatDuration(options_.slow_reader_timeout))),
                                   reasons::kSlowReader));
    } else {
      next = std::min({next, deadline, sequence->give_up, slow});
    }
  }
  next_check_ = next;
  for (auto& [sequence, why] : over) {
    if (ReasonOf(why) == reasons::kTransferWait) {
      EndOrCompute(*sequence, std::move(why), now);
    } else {
      FinishWith(*sequence, std::move(why), now);
    }
  }
}

PlannerSequence EngineImpl::ViewOf(Sequence& sequence, absl::Time now) {
  const bool room = sequence.request.sink->HasRoom(static_cast<size_t>(sequence.in_flight) + 1);
  const bool work = sequence.cached < sequence.length && sequence.wants_token();
  if (room) {
    sequence.parked_since.reset();
  } else if (work && !sequence.parked_since.has_value()) {
    sequence.parked_since = now;
    next_check_ = std::min(next_check_, now + options_.slow_reader_timeout);
  }
  EndPromptIfDone(sequence);
  const bool decodes = sequence.cached >= sequence.prompt_length;
  bool runnable = room && work && (sequence.prompt_ended || !decodes);
  // Parked sequences are asked too: by this call a policy gives back what it does not keep in DRAM,
  // and others may wait for that.
  if (!parts_.policy->Warm(sequence.slot)) {
    if (runnable || cold_ == nullptr) cold_ = &parts_.policy->WarmEvent(sequence.slot);
    runnable = false;
  }
  PlannerSequence view;
  view.slot = sequence.slot;
  view.prompt_length = sequence.prompt_length;
  view.cached = sequence.cached;
  view.length = sequence.length;
  view.wants_token = sequence.wants_token();
  view.rehearsed = sequence.rehearsed;
  view.rehearses = sequence.rehearsed < parts_.policy->rehearsals() &&
                   sequence.cached + 1 > parts_.policy->exact_tokens();
  view.runnable = runnable && GrowOrPreempt(sequence);
  if (view.runnable && !view.rehearses) view.drafts = Draft(sequence);
  return view;
}

void EngineImpl::EnterStep(uint64_t number, Step* step) {
  int results = 0;
  step->sampled.clear();
  step->members.clear();
  step->drafts = false;
  step->decodes = true;
  step->draft_limit = parts_.drafter == nullptr ? 0 : DraftsNow();
  step->running = static_cast<int>(running_.size());
  for (const PlanRow& row : plan_.rows) {
    Sequence& sequence = *slots_[static_cast<size_t>(row.slot)];
    sequence.cached += row.rehearsal ? 0 : row.count - row.drafts;
    sequence.rehearsed += row.rehearsal ? 1 : 0;
    if (sequence.stages.stepped == absl::InfiniteDuration()) {
      sequence.stages.stepped = step->launched - sequence.arrival;
    }
    sequence.last_step = number;
    ++sequence.in_flight;
    step->members.push_back(&sequence);
    step->decodes = step->decodes && row.sample && row.count == 1 + row.drafts;
    if (!row.sample) continue;
    ++sequence.length;
    step->sampled.push_back({&sequence, results, row.drafts});
    step->drafts = step->drafts || row.drafts > 0;
    results += 1 + row.drafts;
  }
}

bool EngineImpl::LaunchStep(absl::Time now) {
  planner_view_.clear();
  cold_ = nullptr;
  for (Sequence* sequence : running_) {
    if (sequence->state == Sequence::State::kPreempting) continue;  // preempted a moment ago
    planner_view_.push_back(ViewOf(*sequence, now));
  }
  if (!preempting_.empty()) {
    std::erase_if(running_,
                  [](const Sequence* s) { return s->state != Sequence::State::kRunning; });
  }
  PlanStep({parts_.model->max_rows(), static_cast<int32_t>(options_.chunk_tokens),
            parts_.policy->decode_rows_per_sequence()},
           planner_view_, &plan_);
  if (plan_.rows.empty()) return false;

  const uint64_t number = ++launched_steps_;
  const int buffer = BufferOf(number);
  Step& step = steps_[static_cast<size_t>(buffer)];
  step.launched = now;
  batch_->Begin(*stream_, buffer);
  FillRowTokens();
  EnterStep(number, &step);
  const absl::Time planned = parts_.clock->Now();
  SLUICE_FAILPOINT_PAUSE(kEngineStep);
  batch_->Launch(*stream_, buffer, plan_, *parts_.model, *parts_.policy, row_tokens_);
  const absl::Duration launch = parts_.clock->Now() - planned;
  times_.plan += planned - now;
  times_.launch += launch;
  if (parts_.trace != nullptr) {
    parts_.trace->Phase("plan", now, planned);
    parts_.trace->Phase("launch", planned, planned + launch);
  }
  parts_.metrics->step_sequences.Observe(static_cast<double>(plan_.rows.size()));
  parts_.metrics->step_seconds(StepPhase::kPlan).Observe(planned - now);
  parts_.metrics->step_seconds(StepPhase::kLaunch).Observe(launch);
  const auto rehearsed = std::count_if(plan_.rows.begin(), plan_.rows.end(),
                                       [](const PlanRow& row) { return row.rehearsal; });
  if (rehearsed > 0) parts_.metrics->rehearsed_rows.Add(static_cast<double>(rehearsed));
  const int64_t pending = plan_.row_count - static_cast<int64_t>(plan_.sample_count) - rehearsed;
  if (pending > 0) parts_.metrics->tokens(TokenKind::kPrompt).Add(static_cast<double>(pending));
  return true;
}

void EngineImpl::EmitResults(const Step::Sampled& sampled, int buffer, absl::Time now) {
  Sequence& sequence = *sampled.sequence;
  // The sequence stopped a step ago: this token is surplus, and its KV goes with the sequence's
  // pages.
  if (sequence.state == Sequence::State::kFinished) return;
  if (absl::Status health = parts_.policy->SlotHealth(sequence.slot); !health.ok()) {
    FinishWith(sequence, std::move(health), now);
    return;
  }
  sequence.drafted += sampled.drafts;
  if (sampled.drafts > 0) parts_.metrics->Drafted(sampled.drafts);
  for (int i = 0;; ++i) {
    const OutputToken token =
        batch_->Result(buffer, sampled.first + i, sequence.request.sampling.logprobs);
    if (token.id < 0) {
      FinishWith(
          sequence,
          WithReason(absl::InternalError("the model's logits are not finite"), reasons::kBadLogits),
          now);
      return;
    }
    ProvePrefix(sequence);
    // The row attended to the tokens so far, by its policy's means unless it was one of the prompt.
    const auto attended = std::ssize(sequence.tokens);
    const bool exact = !sequence.approximate &&
                       attended <= std::max(sequence.prompt_length, parts_.policy->exact_tokens());
    parts_.metrics->decoded_tokens(exact).Add();
    // If the next row's draft is this token, that row is as good as one that was planned after it.
    // It counts before the token is emitted, since the token may be the sequence's last.
    const bool accepted = i < sampled.drafts && sequence.drafts[static_cast<size_t>(i)] == token.id;
    if (accepted) {
      ++sequence.accepted;
      ++accepted_[static_cast<size_t>(i)];
      parts_.metrics->AcceptedDraft(i);
    }
    if (!Emit(sequence, token, exact, now)) return;
    if (!accepted) return LearnDrafts(sequence, buffer, sampled.first + i);
    ++sequence.cached;
    ++sequence.length;
  }
}

void EngineImpl::CompleteStep() {
  const int buffer = BufferOf(++completed_steps_);
  const Step& step = steps_[static_cast<size_t>(buffer)];
  const absl::Time now = parts_.clock->Now();
  for (Sequence* sequence : step.members) --sequence->in_flight;
  for (const Step::Sampled& sampled : step.sampled) EmitResults(sampled, buffer, now);
  CountStep(step, buffer, now);
}

void EngineImpl::CountStep(const Step& step, int buffer, absl::Time now) {
  const absl::Time end = parts_.clock->Now();
  // The step was launched while the step before still ran.
  const absl::Time began = std::max(step.launched, last_completed_);
  ++times_.steps;
  times_.step += now - began;
  times_.emit += end - now;
  const BatchState::Times device = batch_->TimesOf(buffer);
  if (parts_.trace != nullptr) {
    parts_.trace->Phase("emit", now, end);
    parts_.trace->Step({completed_steps_, static_cast<int32_t>(step.members.size()),
                        static_cast<int32_t>(step.sampled.size()), began, now, device});
  }
  times_.kernels += device.compute + device.sample;
  parts_.metrics->step_seconds(StepPhase::kCopy).Observe(device.copy);
  parts_.metrics->step_seconds(StepPhase::kCompute).Observe(device.compute);
  if (!step.sampled.empty()) {
    parts_.metrics->step_seconds(StepPhase::kSample).Observe(device.sample);
  }
  parts_.metrics->step_seconds(StepPhase::kEmit).Observe(end - now);
  parts_.metrics->step_seconds(StepPhase::kTotal).Observe(end - began);
  if (parts_.drafter != nullptr) LearnLimit(step, now);
  last_completed_ = now;
}

void EngineImpl::UpdateGauges() {
  parts_.metrics->SetRunning(static_cast<double>(running_.size()));
  parts_.metrics->waiting.Set(static_cast<double>(awaiting_.size() + waiting_.size()));
}

void EngineImpl::CheckIdle() {
  if (idle_callbacks_.empty() || !sequences_.empty() || !leaving_.empty()) return;
  {
    absl::MutexLock lock(&submit_mutex_);
    if (!alive_ids_.empty()) return;  // submitted, but still in the inbox
  }
  std::vector<std::function<void()>> callbacks;
  callbacks.swap(idle_callbacks_);
  for (const auto& callback : callbacks) callback();
}

}  // namespace sluice
