#include "src/service/prefill/holding_generator.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/request/source_ref.h"
#include "src/sampling/sampling_params.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {

namespace {

// Returns the error that the waiting decode leg is told. An error that another node may not have
// keeps its code; any other is no fault of the waiting node's.
absl::Status ForDecodeLeg(const absl::Status& status) {
  const char* const kPrefix = "its prefill leg failed";
  if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
      absl::IsDeadlineExceeded(status)) {
    return WithMessagePrefix(status, kPrefix);
  }
  return WithReason(absl::FailedPreconditionError(absl::StrCat(kPrefix, ": ", status.message())),
                    reasons::kPrefillFailed);
}

}  // namespace

struct HoldingGenerator::Prompt {
  SequenceId id;
  Request request;
  absl::Time arrived = absl::Now();
  std::shared_ptr<Rooms::Promise> promise;  // null if the prompt has no room
  std::atomic<bool> cancelled = false;
  absl::Mutex mutex;
  absl::Status why ABSL_GUARDED_BY(mutex);  // the first reason stays

  void Cancel(const absl::Status& status) {
    absl::MutexLock lock(&mutex);
    if (why.ok()) why = status;
    cancelled.store(true);
  }
};

HoldingGenerator::HoldingGenerator(Options options)
    : options_(std::move(options)),
      workers_("prefill-hold", options_.threads, options_.max_queued) {}

absl::StatusOr<SequenceId> HoldingGenerator::Submit(Request request) {
  SLUICE_RETURN_IF_ERROR(options_.readiness->CheckTakesWork());
  // The decode node judges stop strings, because only it matches them.
  SLUICE_RETURN_IF_ERROR(ValidateSamplingParams(request.sampling, options_.vocab_size,
                                                /*stop_strings_supported=*/true));
  auto prompt = std::make_shared<Prompt>();
  if (const auto room = request.handoff.source.room; room.has_value()) {
    SLUICE_CHECK(options_.rooms != nullptr);
    SLUICE_ASSIGN_OR_RETURN(prompt->promise, options_.rooms->Open({request.handoff.tenant, *room},
                                                                  PromptDigest(request.prompt)));
  }
  prompt->request = std::move(request);
  const std::string& name = prompt->request.request_id;
  {
    absl::MutexLock lock(&mutex_);
    prompt->id = SequenceId(next_id_++);
    if (!prompts_.emplace(name, prompt).second) {
      return absl::AlreadyExistsError(
          absl::StrCat("request_id: a request named \"", name, "\" is alive"));
    }
  }
  options_.counts->Queued();
  if (!workers_.TryPost([this, prompt] { Run(prompt); })) {
    options_.counts->Left();
    absl::MutexLock lock(&mutex_);
    prompts_.erase(name);
    return ResourceExhausted(reasons::kQueueFull,
                             absl::StrCat("more than ", options_.max_queued,
                                          " prompts wait: try again, or use another prefill node"),
                             absl::Seconds(1));
  }
  return prompt->id;
}

void HoldingGenerator::Cancel(SequenceId id, absl::Status why) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, prompt] : prompts_) {
    if (prompt->id == id) return prompt->Cancel(why);
  }
}

void HoldingGenerator::CancelRequest(const std::string& request_id, absl::Status why,
                                     std::function<void(bool)> done) {
  bool found = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto prompt = prompts_.find(request_id);
    found = prompt != prompts_.end();
    if (found) prompt->second->Cancel(why);
  }
  // This comes second because a prompt that is held in between finds itself cancelled and lets go.
  const bool released = options_.held->ReleaseRequest(request_id);
  done(found || released);
}

void HoldingGenerator::Run(const std::shared_ptr<Prompt>& prompt) {
  options_.counts->Begun(prompt->arrived);
  FinishInfo end;
  end.queued = absl::Now() - prompt->arrived;
  end.stages.ready = absl::ZeroDuration();
  end.prompt_tokens = static_cast<uint32_t>(prompt->request.prompt.size());
  end.status = Guarded("Generate", [&] { return Hold(*prompt, &end); });
  if (prompt->promise != nullptr && !end.status.ok() && !absl::IsCancelled(end.status)) {
    prompt->promise->Fail(ForDecodeLeg(end.status));
  }
  prompt->promise.reset();  // the held prompt owns it now
  end.reason = end.status.ok() ? FinishInfo::Reason::kLength : FinishInfo::Reason::kError;
  end.total = absl::Now() - prompt->arrived;
  options_.counts->Ended(end.status, end.prompt_tokens, prompt->arrived);
  {
    absl::MutexLock lock(&mutex_);
    prompts_.erase(prompt->request.request_id);
  }
  prompt->request.sink->Finish(std::move(end));
}

absl::Status HoldingGenerator::Hold(Prompt& prompt, FinishInfo* end) {
  const auto cancelled = [&prompt] {
    if (!prompt.cancelled.load() && RealClock()->Now() > prompt.request.deadline) {
      prompt.Cancel(absl::DeadlineExceededError("the call's deadline has passed"));
    }
    return prompt.cancelled.load();
  };
  const auto why = [&prompt] {
    absl::MutexLock lock(&prompt.mutex);
    return prompt.why;
  };
  if (cancelled()) return why();
  HeldPrompts::Wanted wanted;
  wanted.prompt = prompt.request.prompt;
  wanted.sampling = prompt.request.sampling;
  wanted.want_first_token = true;
  wanted.tenant = prompt.request.handoff.tenant;
  wanted.request_id = prompt.request.request_id;
  wanted.keep = prompt.promise;
  absl::StatusOr<HeldPrompts::Held> held = options_.held->Hold(wanted, cancelled);
  // A cancelled prompt ends with the reason for its cancellation.
  if (prompt.cancelled.load()) {
    if (held.ok()) options_.held->Release(held->prompt->source_id, wanted.tenant);
    return why();
  }
  SLUICE_RETURN_IF_ERROR(held.status());
  if (prompt.promise != nullptr) prompt.promise->Fill(held->prompt->source_id);
  end->source = {options_.address(), held->prompt->source_id, held->prompt->prompt_digest,
                 options_.model_fingerprint};
  end->completion_tokens = 1;
  end->first_token = absl::Now() - prompt.arrived;
  end->stages.admitted = end->stages.stepped = end->first_token - held->compute;
  prompt.request.sink->Emit(*held->prompt->first_token);
  return absl::OkStatus();
}

}  // namespace sluice
