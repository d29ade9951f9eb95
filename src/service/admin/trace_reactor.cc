#include "src/service/admin/trace_reactor.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/engine/engine.h"
#include "src/engine/step_recorder.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {
namespace {

constexpr size_t kPieceBytes = 1 << 20;

class TraceReactor : public grpc::ServerWriteReactor<v1::TraceResponse> {
 public:
  TraceReactor(Engine* engine, const StepRecorder* recorder, WorkerQueue* workers,
               const v1::TraceRequest& request) {
    if (recorder == nullptr) {
      Finish(ToGrpcStatus(
          WithReason(absl::FailedPreconditionError(
                         "no steps are kept: the node was started with --trace-steps 0"),
                     reasons::kTraceOff)));
      return;
    }
    const size_t steps =
        request.steps() == 0 ? std::numeric_limits<size_t>::max() : request.steps();
    engine->Snapshot([this, recorder, workers, steps](const EngineSnapshot&) {
      auto record = std::make_shared<StepRecord>(recorder->Last(steps));
      const bool taken = workers->TryPost([this, record] {
        json_ = ToTraceEvents(*record).dump(-1, ' ', /*ensure_ascii=*/false,
                                            nlohmann::json::error_handler_t::replace);
        WriteNext();
      });
      if (!taken) {
        Finish(ToGrpcStatus(ResourceExhausted(reasons::kTooManyTraces,
                                              "other traces are being written", absl::Seconds(1))));
      }
    });
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller is gone"));
    } else {
      WriteNext();
    }
  }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    if (sent_ == json_.size()) {
      Finish(grpc::Status::OK);
      return;
    }
    const size_t bytes = std::min(kPieceBytes, json_.size() - sent_);
    message_.set_json(json_.data() + sent_, bytes);
    sent_ += bytes;
    StartWrite(&message_);
  }

  std::string json_;
  size_t sent_ = 0;
  v1::TraceResponse message_;
};

}  // namespace

grpc::ServerWriteReactor<v1::TraceResponse>* NewTraceReactor(Engine* engine,
                                                             const StepRecorder* recorder,
                                                             WorkerQueue* workers,
                                                             const v1::TraceRequest& request) {
  return new TraceReactor(engine, recorder, workers, request);
}

}  // namespace sluice
