#include "src/service/generate/generate_call.h"

#include <grpcpp/alarm.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <functional>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/pull/puller.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/trace_headers.h"

namespace sluice {
namespace {

std::string RandomRequestId() { return absl::StrFormat("%016x%016x", RandomU64(), RandomU64()); }

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  // The engine's clock does not follow leaps of the wall clock, but gRPC's deadline does.
  return RealClock()->Now() + (absl::FromChrono(deadline) - absl::Now());
}

}  // namespace

// Cancels a call some time after its sequence has ended, unless the call is over by then. The call
// and the alarm share it, and either may be the last owner.
class GenerateCall::CancelTimer {
 public:
  explicit CancelTimer(grpc::CallbackServerContext* context) : context_(context) {}

  static void Start(const std::shared_ptr<CancelTimer>& timer, absl::Duration time) {
    timer->alarm_.Set(absl::ToChronoTime(absl::Now() + time), [held = timer](bool fired) mutable {
      // gRPC keeps this function for as long as the alarm, which is a member of the object that it
      // holds.
      const std::shared_ptr<CancelTimer> self = std::move(held);
      absl::MutexLock lock(&self->mutex_);
      if (fired && self->context_ != nullptr) self->context_->TryCancel();
    });
  }
  // Called when the call is over and its context goes.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      context_ = nullptr;
    }
    alarm_.Cancel();
  }

 private:
  absl::Mutex mutex_;
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_);
  grpc::Alarm alarm_;
};

GenerateCall::GenerateCall(const GenerateOptions& options, RequestLog* log,
                           grpc::CallbackServerContext* context, GenerateDialect* dialect)
    : options_(options), log_(log), context_(context), dialect_(dialect) {
  SLUICE_CHECK(options.pump != nullptr && options.metrics != nullptr);
}

void GenerateCall::Start() {
  const absl::Status status = Guarded("Generate", [&] { return Submit(); });
  if (!status.ok()) {
    options_.metrics->requests(RequestOutcome::kRefused, ReasonLabel(status)).Add();
    const std::string name = dialect_->request_id().substr(0, kMaxNameBytes);
    log_->Refused(name, status);
    RequestLog::NoteRefused(*context_, name);
    absl::MutexLock lock(&mutex_);
    finished_ = true;
    EndWith(ToGrpcStatus(dialect_->Translated(status)));
    return;
  }
  stream_->SetReadyCallback([this] { options_.pump->Wake(this); });
}

absl::Status GenerateCall::Submit() {
  SLUICE_ASSIGN_OR_RETURN(Request request, dialect_->Read());
  if (request.request_id.empty()) request.request_id = RandomRequestId();
  request_id_ = request.request_id;
  dialect_->Begin(request_id_);
  if (const std::string& tenant = request.handoff.tenant; !tenant.empty()) {
    NoteCall(*context_, [&](CallFields& call) { call.tenant = tenant; });
  }
  if (log_->log_prompts()) prompt_ = request.prompt;
  request.deadline = DeadlineOf(*context_);
  int malformed = 0;
  request.trace = TraceOf(*context_, &malformed);
  options_.metrics->malformed_trace_headers.Add(malformed);
  auto stream = std::make_shared<TokenStream>(
      options_.stream_capacity, [generator = options_.generator] { generator->Wake(); });
  request.sink = stream;
  if (options_.gate != nullptr) SLUICE_RETURN_IF_ERROR(options_.gate->Admit(*context_, &request));
  const bool pulls = !request.handoff.source.empty();
  std::function<void()> start_pull;
  if (pulls) {
    SLUICE_CHECK(options_.puller != nullptr);
    SLUICE_ASSIGN_OR_RETURN(start_pull, options_.puller->Begin(&request));
  }
  NoteCall(*context_, [&](CallFields& call) {
    call.arrived = absl::Now() - call.begin;
    call.pulled = pulls;
    call.max_tokens = request.sampling.max_tokens;
    call.temperature = request.sampling.temperature;
    call.top_p = request.sampling.top_p;
  });
  const std::string transfer_id = request.handoff.transfer_id;
  const absl::StatusOr<SequenceId> sequence = options_.generator->Submit(std::move(request));
  if (!sequence.ok() && pulls) options_.puller->Abandon(transfer_id);
  SLUICE_RETURN_IF_ERROR(sequence.status());
  if (pulls) start_pull();
  sequence_ = *sequence;
  stream_ = std::move(stream);
  return absl::OkStatus();
}

void GenerateCall::Written(bool ok) {
  if (SLUICE_FAILPOINT(kDecodeReset)) context_->TryCancel();
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) gone_ = true;
  }
  if (!ok) CancelSequence();
  Pump();
}

void GenerateCall::CallerGone() {
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
  }
  CancelSequence();
  Pump();
}

void GenerateCall::Over() {
  if (stream_ != nullptr) {
    stream_->SetReadyCallback(nullptr);
    options_.pump->Forget(this);
    absl::MutexLock lock(&mutex_);
    log_->Ended(request_id_, sequence_, *end_, prompt_, output_);
    RequestLog::NoteEnded(*context_, request_id_, *end_);
  }
  if (cancel_timer_ != nullptr) cancel_timer_->Stop();
}

// Sends the tokens that have come, unless a write is under way. The end of a write calls here
// again.
void GenerateCall::Pump() {
  absl::MutexLock lock(&mutex_);
  if (stream_ != nullptr && cancel_timer_ == nullptr && stream_->Finished()) {
    cancel_timer_ = std::make_shared<CancelTimer>(context_);
    CancelTimer::Start(cancel_timer_, options_.cancel_after);
  }
  if (writing_ || finished_) return;
  bool unsent = false;
  if (!end_.has_value()) {
    TokenStream::Batch batch = stream_->Read();
    end_ = std::move(batch.finish);
    if (log_->log_prompts()) {
      for (const OutputToken& token : batch.tokens) output_.push_back(token.id);
    }
    if (!batch.tokens.empty() && !gone_ && dialect_->SetTokens(batch.tokens)) {
      const bool last = end_.has_value() && end_->reason != FinishInfo::Reason::kError;
      if (!last || !dialect_->EndHasTokens()) {
        writing_ = true;
        Write();
        return;
      }
      unsent = true;
    }
  }
  if (end_.has_value()) WriteEnd(unsent);
}

void GenerateCall::WriteEnd(bool add) {
  finished_ = true;
  if (dialect_->SetEnd(*end_, add)) {
    WriteLast();
  } else {
    EndWith(ToGrpcStatus(dialect_->Translated(end_->status)));
  }
}

void GenerateCall::CancelSequence() {
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value() || finished_ || cancelled_) return;
    cancelled_ = true;
  }
  const absl::Status why =
      DeadlineOf(*context_) <= RealClock()->Now()
          ? absl::DeadlineExceededError("the call's deadline has passed")
          : WithReason(absl::CancelledError("the caller is gone or has cancelled"),
                       reasons::kCallerGone);
  options_.generator->Cancel(sequence_, why);
}

}  // namespace sluice
