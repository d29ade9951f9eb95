#include "src/service/decode_service.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "sluice/v1/decode.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/request/token_sink.h"
#include "src/service/call_record.h"
#include "src/service/guarded.h"
#include "src/service/proto_conversion.h"
#include "src/service/puller.h"
#include "src/service/request_log.h"
#include "src/service/status_mapping.h"
#include "src/service/trace_headers.h"

namespace sluice {
namespace {

std::string RandomRequestId() { return absl::StrFormat("%016x%016x", RandomU64(), RandomU64()); }

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  // The engine's clock does not follow leaps of the wall clock, gRPC's deadline does.
  return RealClock()->Now() + (absl::FromChrono(deadline) - absl::Now());
}

// Cancels a call some time after its sequence has ended, unless it is over by then. Shared by the
// reactor and the alarm, either of which may be the last.
class Linger {
 public:
  explicit Linger(grpc::CallbackServerContext* context) : context_(context) {}

  static void Start(const std::shared_ptr<Linger>& linger, absl::Duration time) {
    linger->alarm_.Set(absl::ToChronoTime(absl::Now() + time), [held = linger](bool fired) mutable {
      // gRPC keeps this function for as long as the alarm, which is a member of what it holds.
      const std::shared_ptr<Linger> self = std::move(held);
      absl::MutexLock lock(&self->mutex_);
      if (fired && self->context_ != nullptr) self->context_->TryCancel();
    });
  }
  // The call is over: its context goes.
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

// One Generate. The engine's thread (through the TokenStream) and gRPC's threads meet in Pump().
//
// Its one Finish follows the engine's one Finish, whatever ended the sequence: a client that is
// gone makes the engine end the sequence, and what the engine then says ends the call. gRPC calls
// OnDone after that and after every other reaction has returned; SetReadyCallback(nullptr) waits
// for the engine's thread. So nothing can reach a reactor that is deleted.
class GenerateReactor : public grpc::ServerWriteReactor<v1::GenerateResponse> {
 public:
  GenerateReactor(const DecodeServiceOptions& options, RequestLog* log,
                  grpc::CallbackServerContext* context, const v1::GenerateRequest& message)
      : engine_(options.engine), log_(log), linger_time_(options.linger), context_(context) {
    const absl::Status status = Guarded("Generate", [&] { return Begin(options, message); });
    if (!status.ok()) {
      if (options.metrics != nullptr) {
        options.metrics->requests(RequestOutcome::kRefused, ReasonLabel(status)).Add();
      }
      log_->Refused(message.request_id().substr(0, kMaxNameBytes), status);
      RequestLog::NoteRefused(*context, message.request_id().substr(0, kMaxNameBytes));
      absl::MutexLock lock(&mutex_);
      finished_ = true;
      Finish(ToGrpcStatus(status));
      return;
    }
    stream_->SetReadyCallback([this] { Pump(); });
  }

  void OnWriteDone(bool ok) override {
    if (SLUICE_FAILPOINT(kDecodeReset)) context_->TryCancel();
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok) gone_ = true;
    }
    if (!ok) CancelSequence();
    Pump();
  }

  // The client has cancelled, its connection broke, or its deadline passed.
  void OnCancel() override {
    {
      absl::MutexLock lock(&mutex_);
      gone_ = true;
    }
    CancelSequence();
    Pump();
  }

  void OnDone() override {
    if (stream_ != nullptr) {
      stream_->SetReadyCallback(nullptr);
      Ended();
    }
    if (linger_ != nullptr) linger_->Stop();
    delete this;
  }

 private:
  void Ended() {
    absl::MutexLock lock(&mutex_);
    log_->Ended(request_id_, sequence_, *end_, prompt_, output_);
    RequestLog::NoteEnded(*context_, request_id_, *end_);
  }

  absl::Status Begin(const DecodeServiceOptions& options, const v1::GenerateRequest& message) {
    SLUICE_ASSIGN_OR_RETURN(Request request,
                            FromProto(message, options.vocab_size, options.max_context));
    if (request.request_id.empty()) request.request_id = RandomRequestId();
    request_id_ = request.request_id;
    if (const std::string& tenant = request.handoff.tenant; !tenant.empty()) {
      NoteCall(*context_, [&](CallFields& call) { call.tenant = tenant; });
    }
    if (log_->log_prompts()) prompt_ = request.prompt;
    request.deadline = DeadlineOf(*context_);
    int malformed = 0;
    request.trace = TraceOf(*context_, &malformed);
    if (options.metrics != nullptr) options.metrics->malformed_trace_headers.Add(malformed);
    auto stream = std::make_shared<TokenStream>(options.stream_capacity,
                                                [engine = engine_] { engine->Wake(); });
    request.sink = stream;
    const bool pulls = !request.handoff.source.empty();
    if (pulls) SLUICE_RETURN_IF_ERROR(options.puller->Begin(&request));
    const std::string transfer_id = request.handoff.transfer_id;
    const absl::StatusOr<SequenceId> sequence = engine_->Submit(std::move(request));
    if (!sequence.ok() && pulls) options.puller->Abandon(transfer_id);
    SLUICE_RETURN_IF_ERROR(sequence.status());
    sequence_ = *sequence;
    stream_ = std::move(stream);
    return absl::OkStatus();
  }

  // Sends what has come, unless a write is under way; its end calls here again.
  void Pump() {
    absl::MutexLock lock(&mutex_);
    if (stream_ != nullptr && linger_ == nullptr && stream_->Finished()) {
      linger_ = std::make_shared<Linger>(context_);
      Linger::Start(linger_, linger_time_);
    }
    if (writing_ || finished_) return;
    if (!end_.has_value()) {
      TokenStream::Batch batch = stream_->Read();
      end_ = std::move(batch.finish);
      if (log_->log_prompts()) {
        for (const OutputToken& token : batch.tokens) output_.push_back(token.id);
      }
      if (!batch.tokens.empty() && !gone_) {
        message_.Clear();
        message_.set_request_id(request_id_);
        for (const OutputToken& token : batch.tokens) *message_.add_tokens() = ToProto(token);
        const bool last = end_.has_value() && end_->reason != FinishInfo::Reason::kError;
        if (last) {
          WriteLast();
        } else {
          writing_ = true;
          StartWrite(&message_);
        }
        return;
      }
    }
    if (!end_.has_value()) return;
    if (end_->reason == FinishInfo::Reason::kError) {
      finished_ = true;
      Finish(ToGrpcStatus(end_->status));
    } else {
      message_.Clear();
      message_.set_request_id(request_id_);
      WriteLast();
    }
  }

  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    *message_.mutable_finish() = ToProto(*end_);
    finished_ = true;
    StartWriteAndFinish(&message_, grpc::WriteOptions(), grpc::Status::OK);
  }

  void CancelSequence() {
    {
      absl::MutexLock lock(&mutex_);
      if (end_.has_value() || finished_ || cancelled_) return;
      cancelled_ = true;
    }
    const absl::Status why =
        DeadlineOf(*context_) <= RealClock()->Now()
            ? absl::DeadlineExceededError("the call's deadline has passed")
            : WithReason(absl::CancelledError("the caller is gone or has cancelled"),
                         "CALLER_GONE");
    engine_->Cancel(sequence_, why);
  }

  Engine* const engine_;
  RequestLog* const log_;
  const absl::Duration linger_time_;
  grpc::CallbackServerContext* const context_;
  std::string request_id_;
  SequenceId sequence_;
  std::vector<int32_t> prompt_;          // for the log, if it takes it
  std::shared_ptr<TokenStream> stream_;  // null: Submit was refused

  absl::Mutex mutex_;
  v1::GenerateResponse message_;                           // under way while writing_ or finished_
  std::optional<FinishInfo> end_ ABSL_GUARDED_BY(mutex_);  // read from the stream
  std::vector<int32_t> output_ ABSL_GUARDED_BY(mutex_);    // the same
  std::shared_ptr<Linger> linger_;  // set once, under mutex_, when the sequence has ended
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;       // nobody reads any more
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // the engine was told
};

class DecodeService final : public v1::Decode::CallbackService {
 public:
  explicit DecodeService(const DecodeServiceOptions& options)
      : options_(options), log_(RealClock(), options.log_prompts) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return new GenerateReactor(options_, &log_, context, *request);  // deletes itself
  }

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const v1::CancelRequest* request,
                                   v1::CancelResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::Status status = CheckName("request_id", request->request_id());
    if (status.ok() && request->request_id().empty()) {
      status = InvalidField("request_id", "is empty");
    }
    if (!status.ok()) {
      reactor->Finish(ToGrpcStatus(status));
      return reactor;
    }
    options_.engine->CancelRequest(
        request->request_id(),
        WithReason(absl::CancelledError("cancelled by Cancel"), "CANCEL_CALL"),
        [reactor, response](bool found) {
          response->set_found(found);
          reactor->Finish(grpc::Status::OK);
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* Forget(grpc::CallbackServerContext* context,
                                   const v1::ForgetRequest* request,
                                   v1::ForgetResponse* response) override {
    absl::Status status = CheckName("sequence_id", request->sequence_id());
    if (status.ok() && request->sequence_id().empty()) {
      status = InvalidField("sequence_id", "is empty");
    }
    if (status.ok()) status = CheckName("tenant", request->tenant());
    if (status.ok()) {
      response->set_found(options_.engine->Forget(request->sequence_id(), request->tenant()));
    }
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

 private:
  const DecodeServiceOptions options_;
  RequestLog log_;
};

}  // namespace

GrpcService NewDecodeService(const DecodeServiceOptions& options) {
  return {v1::Decode::service_full_name(), std::make_shared<DecodeService>(options)};
}

}  // namespace sluice
