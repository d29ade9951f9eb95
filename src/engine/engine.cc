#include "src/engine/engine.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"

namespace sluice {
EngineImpl::EngineImpl(const Options& options, const Parts& parts,
                       std::unique_ptr<BatchState> batch, std::unique_ptr<Stream> stream)
    : options_(options),
      parts_(parts),
      readiness_(parts.readiness != nullptr ? parts.readiness : &own_readiness_),
      batch_(std::move(batch)),
      stream_(std::move(stream)),
      slots_(options.max_sequences, nullptr),
      seeds_(options.seed != 0 ? options.seed : RandomU64()) {
  parts_.metrics->exact_limit.Set(static_cast<double>(parts_.policy->exact_tokens()));
  for (int slot = static_cast<int>(options.max_sequences) - 1; slot >= 0; --slot) {
    free_slots_.push_back(slot);
  }
  for (Step& step : steps_) {
    step.sampled.reserve(options.max_sequences);
    step.members.reserve(options.max_sequences);
  }
  plan_.rows.reserve(options.max_sequences);
  if (parts_.drafter != nullptr) {
    row_tokens_.reserve(static_cast<size_t>(parts_.model->max_rows()));
    learnt_.reserve(options_.draft_tokens);
    accepted_.assign(options_.draft_tokens, 0);
    if (options_.limit_drafts) draft_limit_.emplace(static_cast<int>(options_.draft_tokens));
    parts_.metrics->draft_limit.Set(DraftsNow());
    parts_.metrics->SetDraftTokens(static_cast<int>(options_.draft_tokens));
  }
  running_.reserve(options.max_sequences);
  planner_view_.reserve(options.max_sequences);
  waiting_view_.reserve(options.max_sequences);
  victim_view_.reserve(options.max_sequences);
  admissions_.reserve(options.max_sequences);
  headroom_.resize(static_cast<size_t>(parts_.policy->ranks()));
  parts_.transfers->SetWake([this] {
    transfers_changed_.store(true, std::memory_order_release);
    inbox_.Wake();
  });
}

EngineImpl::~EngineImpl() {
  parts_.transfers->SetWake(nullptr);
  SLUICE_CHECK(sequences_.empty() && steps_under_way() == 0,
               "an engine ends idle: EngineThread sees to it");
}

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
  if (request.keep > parts_.transfers->max_lease()) {
    return InvalidField(
        "keep", absl::StrCat("at most ", absl::FormatDuration(parts_.transfers->max_lease()),
                             " (lease_seconds), found ", absl::FormatDuration(request.keep)));
  }
  if (!request.handoff.empty()) return absl::OkStatus();
  if (request.prompt.empty()) {
    return InvalidField("prompt_token_ids", "must not be empty where nothing is handed over");
  }
  if (!ComputesPromptOf(request)) {
    const bool asked = !request.handoff_error.empty();
    return WithReason(
        absl::FailedPreconditionError(
            asked ? absl::StrCat("the prefill node handed nothing over (", request.handoff_error,
                                 "), and this node does not compute prompts: mend that, or set "
                                 "local_prefill to on_failure")
                  : "nothing was handed over (no transfer_id, no rendezvous_key), and this node "
                    "does not compute prompts: send the caches by KvIngest first, or set "
                    "local_prefill to always"),
        reasons::kNoHandoff);
  }
  return CheckPromptFits(request, request.prompt.size());
}

bool EngineImpl::ComputesPromptOf(const Request& request) const {
  if (request.allow_local_prefill || options_.local_prefill == LocalPrefill::kAlways) return true;
  return options_.local_prefill == LocalPrefill::kOnFailure && !request.handoff_error.empty();
}

absl::Status EngineImpl::CheckPromptFits(const Request& request, size_t prompt) const {
  if (prompt >= options_.max_context) {
    return InvalidField(
        "prompt_token_ids",
        absl::StrCat(
            "this node's context is ", options_.max_context,
            " tokens and must hold one more, found a prompt of ", prompt,
            request.handoff.sequence_id.empty() ? "" : ", the kept sequence's tokens included"));
  }
  const int64_t most = LocalMaxTokens(static_cast<int64_t>(prompt));
  if (most < 1) {
    return InvalidField("prompt_token_ids",
                        absl::StrCat("this node's HBM holds ", parts_.policy->max_tokens(),
                                     " tokens and must hold one more, found a prompt of ", prompt,
                                     "; shorten it, or raise --hbm-bytes"));
  }
  return CheckTokens(request.sampling, most, "what context and HBM leave after the prompt");
}

int64_t EngineImpl::LocalMaxTokens(int64_t prompt) const {
  return std::min<int64_t>(options_.max_context, parts_.policy->max_tokens()) - prompt;
}

absl::Status EngineImpl::CheckTokens(const SamplingParams& sampling, int64_t most,
                                     const std::string& why) {
  if (sampling.max_tokens.value_or(1) > most) {
    return InvalidField("sampling.max_tokens", absl::StrCat("at most ", most, ", ", why, "; found ",
                                                            *sampling.max_tokens));
  }
  if (sampling.min_tokens > most) {
    return InvalidField("sampling.min_tokens",
                        absl::StrCat("at most ", most, ", ", why, "; found ", sampling.min_tokens));
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::CheckManifest(const Request& request, const std::vector<int32_t>& prompt,
                                       uint32_t max_new_tokens) {
  if (!request.prompt.empty() && request.prompt != prompt) {
    return InvalidField("prompt_token_ids",
                        "differs from the manifest's; leave it empty with a handoff");
  }
  return CheckTokens(request.sampling, max_new_tokens, "the max_new_tokens of its transfer");
}

absl::Status EngineImpl::CheckAttached(const Request& request,
                                       const TransferTable::AttachedInfo& info) const {
  if (!info.kept) return CheckManifest(request, info.prompt, info.max_new_tokens);
  return CheckPromptFits(request, info.prompt.size() + request.prompt.size());
}

absl::StatusOr<SequenceId> EngineImpl::Submit(Request request) {
  SLUICE_RETURN_IF_ERROR(CheckRequest(request));
  absl::MutexLock lock(&submit_mutex_);
  SLUICE_RETURN_IF_ERROR(readiness_->CheckTakesWork());
  if (SLUICE_FAILPOINT(kEngineQueue) || waiting_count_ >= options_.max_waiting) {
    return ResourceExhausted(
        reasons::kTooManyWaiting,
        absl::StrCat(waiting_count_, " sequences wait already; try again later"),
        parts_.finish_rate != nullptr ? parts_.finish_rate->RetryAfter() : FinishRate::kDefault);
  }
  if (alive_ids_.contains(request.request_id)) {
    return WithReason(
        absl::AlreadyExistsError(absl::StrCat("request_id '", request.request_id, "' is alive")),
        reasons::kRequestIdInUse);
  }
  std::optional<TransferTable::AttachId> attached;
  if (!request.handoff.empty()) {
    SLUICE_ASSIGN_OR_RETURN(attached, parts_.transfers->Attach(request.handoff));
    if (const auto info = parts_.transfers->Info(*attached); info.has_value()) {
      absl::Status status = CheckAttached(request, *info);
      if (!status.ok()) {
        parts_.transfers->Detach(*attached, /*abort_transfer=*/false);
        return status;
      }
    }
  }
  alive_ids_.insert(request.request_id);
  ++waiting_count_;

  std::vector<int32_t> stop_ids = StopIds(request.sampling, parts_.model->config().eos_token_ids);
  StopConditions stops(std::move(stop_ids), request.sampling.stop, request.sampling.min_tokens);
  // std::function must be copyable, but the sequence is handed on only once.
  auto sequence = std::make_shared<std::unique_ptr<Sequence>>(
      std::make_unique<Sequence>(std::move(request), std::move(stops)));
  const SequenceId id(next_id_++);
  (*sequence)->id = id;
  (*sequence)->attached = attached;
  inbox_.Post([this, sequence] { Add(std::move(*sequence), parts_.clock->Now()); });
  return id;
}

void EngineImpl::Cancel(SequenceId id, absl::Status why) {
  inbox_.Post([this, id, why = std::move(why)] {
    const auto it = sequences_.find(id);
    if (it != sequences_.end()) FinishWith(*it->second, why, parts_.clock->Now());
  });
}

void EngineImpl::CancelRequest(const std::string& request_id, absl::Status why,
                               std::function<void(bool)> done) {
  inbox_.Post([this, request_id, why = std::move(why), done = std::move(done)] {
    const auto it = by_name_.find(request_id);
    const bool found = it != by_name_.end();
    if (found) FinishWith(*it->second, why, parts_.clock->Now());
    done(found);
  });
}

void EngineImpl::Snapshot(std::function<void(EngineSnapshot)> done) {
  inbox_.Post([this, done = std::move(done)] {
    EngineSnapshot snapshot;
    snapshot.draining = readiness_->draining();
    snapshot.times = times_;
    const absl::Time now = parts_.clock->Now();
    snapshot.running = static_cast<uint32_t>(running_.size());
    snapshot.prompts_ended = static_cast<uint32_t>(std::count_if(
        running_.begin(), running_.end(), [](const Sequence* s) { return s->prompt_ended; }));
    snapshot.waiting = static_cast<uint32_t>(awaiting_.size() + waiting_.size());
    for (const auto& [id, sequence] : sequences_) {
      using State = SequenceSnapshot::State;
      SequenceSnapshot s;
      s.request_id = sequence->request.request_id;
      s.transfer_id = sequence->transfer_id;
      const bool waiting = sequence->state == Sequence::State::kWaiting;
      s.state = sequence->state == Sequence::State::kAwaitingTransfer ? State::kAwaitingTransfer
                : sequence->state == Sequence::State::kPreempting     ? State::kPreempted
                : waiting && sequence->preemptions > 0                ? State::kPreempted
                : waiting                                             ? State::kWaiting
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

void EngineImpl::Drain(absl::Time deadline, absl::Status why, std::function<void()> idle) {
  absl::MutexLock lock(&submit_mutex_);
  readiness_->SetDraining(true);
  inbox_.Post([this, deadline, why = std::move(why), idle = std::move(idle)] {
    drain_deadline_ = deadline;
    drain_why_ = why;
    next_check_ = absl::InfinitePast();
    if (idle != nullptr) idle_callbacks_.push_back(idle);
    // No Reserve is accepted any more, so a Generate whose transfer has not begun would wait in
    // vain.
    const std::vector<Sequence*> awaiting = awaiting_;
    for (Sequence* sequence : awaiting) {
      if (parts_.transfers->Info(*sequence->attached).has_value()) continue;
      FinishWith(*sequence,
                 WithReason(absl::UnavailableError("this node is draining and its transfer had not "
                                                   "begun; send the request elsewhere"),
                            reasons::kDraining),
                 parts_.clock->Now());
    }
  });
}

void EngineImpl::Resume() {
  absl::MutexLock lock(&submit_mutex_);
  readiness_->SetDraining(false);
  inbox_.Post([this] { drain_deadline_ = absl::InfiniteFuture(); });
}

void EngineImpl::CancelAll(absl::Status why) {
  inbox_.Post([this, why = std::move(why)] { EndAll(why, parts_.clock->Now()); });
}

void EngineImpl::EndAll(const absl::Status& why, absl::Time now) {
  std::vector<Sequence*> all;
  for (const auto& [id, sequence] : sequences_) all.push_back(sequence.get());
  for (Sequence* sequence : all) FinishWith(*sequence, why, now);
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const Options& options, const Parts& parts) {
  SLUICE_CHECK(parts.metrics != nullptr);
  SLUICE_CHECK(options.max_context > 0 &&
               options.max_context <= static_cast<uint32_t>(parts.model->max_context()));
  SLUICE_RETURN_IF_ERROR(CheckAttends(*parts.policy, parts.model->cache_layout()));
  const int drafts = parts.drafter == nullptr ? 0 : static_cast<int>(options.draft_tokens);
  if (drafts > 0) SLUICE_RETURN_IF_ERROR(CheckVerifies(*parts.policy, drafts));
  SLUICE_CHECK(parts.drafter == nullptr || !parts.drafter->on_device() || parts.model->drafts());
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<BatchState> batch,
      BatchState::Create(
          {static_cast<int>(options.max_sequences), static_cast<int>(options.max_context), drafts,
           parts.drafter != nullptr && parts.drafter->on_device(), parts.batch_log, parts.rank_rows,
           options.halves_from},
          parts.device, *parts.model));
  std::unique_ptr<Stream> stream = parts.device->NewStream(Device::StreamKind::kCompute);
  SLUICE_RETURN_IF_ERROR(batch->RecordPrograms(*stream, *parts.model, *parts.policy));
  return std::make_unique<EngineImpl>(options, parts, std::move(batch), std::move(stream));
}

}  // namespace sluice
