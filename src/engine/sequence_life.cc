// The life of a sequence: how it arrives, becomes ready, emits and ends.
#include <algorithm>
#include <utility>

#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"
#include "src/metrics/metrics.h"
#include "src/model/token_bytes.h"
#include "src/request/request_end.h"

namespace sluice {

void EngineImpl::Add(std::unique_ptr<Sequence> owned, absl::Time now) {
  Sequence& sequence = *owned;
  sequence.arrival = now;
  by_name_.emplace(sequence.request.request_id, &sequence);
  sequences_.emplace(sequence.id, std::move(owned));
  next_check_ = absl::InfinitePast();
  if (sequence.attached.has_value()) {
    sequence.state = Sequence::State::kAwaitingTransfer;
    sequence.give_up = now + options_.transfer_wait;
    awaiting_.push_back(&sequence);
    Trace(sequence, SequenceStage::kTransfer, now);
    transfers_changed_.store(true, std::memory_order_release);
    return;
  }
  if (!sequence.request.handoff_error.empty()) {
    NoteLocalPrefill(sequence.request, sequence.request.handoff_error);
  }
  BecomeReadyWithout(sequence, now);
}

void EngineImpl::NoteLocalPrefill(const Request& request, const std::string& error) {
  Log(LogLevel::kWarn, "computing a prompt whose caches did not arrive",
      {{"request_id", request.request_id},
       {"prompt_tokens", request.prompt.size()},
       {"error", error}});
  parts_.metrics->local_prefills.Add();
}

void EngineImpl::BecomeReadyWithout(Sequence& sequence, absl::Time now) {
  ReadySequence ready;
  ready.tenant = sequence.request.handoff.tenant;
  ready.prompt = sequence.request.prompt;
  ready.max_new_tokens =
      static_cast<uint32_t>(LocalMaxTokens(static_cast<int64_t>(sequence.request.prompt.size())));
  BecomeReady(sequence, std::move(ready), now);
}

void EngineImpl::EndOrCompute(Sequence& sequence, absl::Status why, absl::Time now) {
  const Request& request = sequence.request;
  // The caches of a kept sequence cannot be computed from the request, and a node that shuts down
  // takes on nothing.
  if (options_.local_prefill == LocalPrefill::kNever || request.prompt.empty() ||
      !request.handoff.sequence_id.empty() || ReasonOf(why) == reasons::kDraining ||
      !CheckPromptFits(request, request.prompt.size()).ok()) {
    FinishWith(sequence, std::move(why), now);
    return;
  }
  NoteLocalPrefill(request, why.ToString());
  if (sequence.attached.has_value()) {
    parts_.transfers->Detach(*sequence.attached, /*abort_transfer=*/true);
    sequence.attached.reset();
  }
  awaiting_.erase(std::find(awaiting_.begin(), awaiting_.end(), &sequence));
  BecomeReadyWithout(sequence, now);
}

void EngineImpl::BecomeReady(Sequence& sequence, ReadySequence ready, absl::Time now) {
  sequence.give_up = absl::InfiniteFuture();
  sequence.ready = now;
  sequence.stages.ready = now - sequence.arrival;
  sequence.transfer_id = std::move(ready.transfer_id);
  sequence.tenant = std::move(ready.tenant);
  sequence.reused_tokens = ready.reused_tokens;
  sequence.home = std::move(ready.home);
  sequence.place = std::move(ready.place);
  sequence.hints = std::move(ready.hints);
  sequence.home_tokens = ready.context_length;
  sequence.approximate = ready.approximate;
  sequence.tokens = std::move(ready.prompt);
  sequence.prompt_length = static_cast<int64_t>(sequence.tokens.size());
  sequence.context_length = ready.context_length;
  sequence.max_tokens = sequence.request.sampling.max_tokens.value_or(ready.max_new_tokens);
  sequence.last_emit = sequence.arrival;
  sequence.ticket = next_ticket_++;
  Enqueue(sequence);
  Trace(sequence, SequenceStage::kQueued, now);
  parts_.metrics->tokens(ready.kept ? TokenKind::kKept : TokenKind::kHandedOver)
      .Add(static_cast<double>(ready.context_length - ready.reused_tokens));
  if (ready.context_length > 0 && !ready.kept) {
    CountReuse(ready.context_length, ready.reused_tokens);
  }
  ShareHandedOver(sequence);
  // The handoff's first tokens are pending, and go to the caller before anything is computed.
  for (OutputToken& token : ready.first_tokens) {
    if (!sequence.request.sampling.logprobs.has_value()) {
      token.logprob.reset();
      token.top_logprobs.clear();
    }
    if (!Emit(sequence, token, /*exact=*/true, now)) return;
  }
  sequence.length = static_cast<int64_t>(sequence.tokens.size());
  // If caches cover every token, the last one is computed again, because its logits choose the
  // next.
  sequence.cached = std::min(sequence.context_length, sequence.length - 1);
  // These rows of the prompt choose nothing: their caches are there and are written again.
  const int rows = parts_.policy->last_rows_wanted(sequence.total());
  if (rows > 0 && sequence.hints.empty()) {
    sequence.cached =
        std::min(sequence.cached, std::max<int64_t>(sequence.prompt_length - rows, 0));
  }
  // Blocks that others share are not written. A next turn that wants more rows than the turn before
  // left out does without the first of them.
  if (sequence.home != nullptr) {
    sequence.cached = std::max(sequence.cached, sequence.home->shared_tokens());
  }
}

bool EngineImpl::Emit(Sequence& sequence, const OutputToken& token, bool exact, absl::Time now) {
  const int32_t id = token.id;
  sequence.tokens.push_back(id);
  ++sequence.emitted;
  sequence.exact += exact ? 1 : 0;
  if (sequence.emitted == 1) sequence.first_token = now - sequence.arrival;
  if (sequence.emitted == 1) {
    parts_.metrics->time_to_first_token.Observe(now - sequence.arrival);
  } else {
    parts_.metrics->inter_token_latency.Observe(now - sequence.last_emit);
  }
  parts_.metrics->tokens(TokenKind::kOutput).Add();
  sequence.last_emit = now;
  sequence.request.sink->Emit(token);
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

void EngineImpl::Trace(const Sequence& sequence, SequenceStage stage, absl::Time at) {
  if (parts_.trace != nullptr) parts_.trace->Enter(sequence.id, sequence.request, stage, at);
}

void EngineImpl::FinishWith(Sequence& sequence, absl::Status why, absl::Time now) {
  FinishInfo info;
  info.reason = FinishInfo::Reason::kError;
  info.status = std::move(why);
  if (absl::IsInternal(info.status)) {
    sequence.unproven = false;
    ForgetPrefix(sequence);
  }
  Finish(sequence, std::move(info), now);
}

void EngineImpl::Keep(Sequence& sequence) {
  // The last token's keys and values are left out, even if a step has made them: whether one has
  // depends on timing, and the next turn computes them as a row of its prompt.
  sequence.keep_tokens = std::min(sequence.in_batch() ? sequence.cached : sequence.home_tokens,
                                  static_cast<int64_t>(sequence.tokens.size()) - 1);
  if (sequence.keep_tokens <= 0) return;
  if (sequence.in_batch() ? !parts_.policy->ReserveHostCopy(sequence.slot, sequence.keep_tokens, {})
                          : sequence.home == nullptr) {
    return;
  }
  KeptSequence kept;
  kept.tenant = sequence.request.handoff.tenant;
  kept.tokens = sequence.tokens;
  kept.context_length = static_cast<uint32_t>(sequence.keep_tokens);
  kept.lease = sequence.request.keep;
  kept.approximate = sequence.approximate || sequence.exact < sequence.emitted;
  absl::StatusOr<std::string> id = parts_.transfers->kept().Keep(std::move(kept));
  if (!id.ok()) return;  // as if there were no capacity: without an id
  sequence.keep_id = *std::move(id);
  sequence.evicted = false;
}

void EngineImpl::Finish(Sequence& sequence, FinishInfo info, absl::Time now) {
  SLUICE_CHECK(sequence.state != Sequence::State::kFinished, "a sequence ends exactly once");
  info.prompt_tokens = static_cast<uint32_t>(sequence.prompt_length);
  info.completion_tokens = static_cast<uint32_t>(sequence.emitted);
  info.cached_tokens = static_cast<uint32_t>(sequence.context_length);
  info.reused_tokens = static_cast<uint32_t>(sequence.reused_tokens);
  info.exact_tokens = static_cast<uint32_t>(sequence.exact);
  info.drafted_tokens = static_cast<uint32_t>(sequence.drafted);
  info.accepted_tokens = static_cast<uint32_t>(sequence.accepted);
  info.transfer_id = sequence.transfer_id;
  info.queued = sequence.queued;
  info.first_token = sequence.first_token;
  info.total = now - sequence.arrival;
  info.stages = sequence.stages;
  const RequestEnd end = EndOf(info);
  parts_.metrics->requests(end.outcome, end.reason).Add();
  parts_.metrics->request_seconds.Observe(now - sequence.arrival);
  Trace(sequence, SequenceStage::kEnded, now);
  if (parts_.finish_rate != nullptr) parts_.finish_rate->Finished();
  const bool had_slot = sequence.in_batch();
  if (info.reason != FinishInfo::Reason::kError && sequence.request.keep > absl::ZeroDuration()) {
    Keep(sequence);
    info.sequence_id = sequence.keep_id;
  }
  ProvePrefix(sequence);  // a caller that left says nothing about the caches
  if (sequence.keep_id.empty()) PlanShare(sequence, info);
  if (sequence.attached.has_value()) {
    parts_.transfers->Detach(*sequence.attached, /*abort_transfer=*/true);
  }
  std::erase(awaiting_, &sequence);
  std::erase(waiting_, &sequence);
  std::erase(running_, &sequence);
  std::erase(preempting_, &sequence);
  if (sequence.soft) --soft_running_;
  sequence.state = Sequence::State::kFinished;
  const std::shared_ptr<TokenSink> sink = std::move(sequence.request.sink);
  by_name_.erase(sequence.request.request_id);
  const auto it = sequences_.find(sequence.id);
  std::unique_ptr<Sequence> owned = std::move(it->second);
  sequences_.erase(it);
  {
    absl::MutexLock lock(&submit_mutex_);
    alive_ids_.erase(sequence.request.request_id);
    if (!sequence.seed.has_value()) --waiting_count_;  // it was never admitted
  }
  // A launched step may still point to the sequence, so it goes in ReleaseSlots, between turns'
  // phases.
  if (had_slot) {
    leaving_.push_back(std::move(owned));
  } else if (!owned->keep_id.empty()) {
    parts_.transfers->kept().KeepHome(owned->keep_id, std::move(owned->home));
  }
  sink->Finish(std::move(info));
}

}  // namespace sluice
