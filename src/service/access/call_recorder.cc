#include "src/service/access/call_recorder.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_interceptor.h>

#include <utility>

#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/service/access/access_log.h"
#include "src/service/access/caller.h"
#include "src/service/telemetry/call_spans.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/trace_headers.h"

namespace sluice {
namespace {

namespace ge = grpc::experimental;

class Recorder : public ge::Interceptor {
 public:
  Recorder(const CallReaders& readers, const Access* access, ge::ServerRpcInfo* info)
      : readers_(readers), access_(access), context_(info->server_context()) {
    CallFields call;
    call.method = info->method();
    call.begin = absl::Now();
    record_ = std::make_shared<CallRecord>(std::move(call));
    KeepRecord(context_, record_);
  }
  // The call is over, and the code that served it has added what it knows.
  ~Recorder() override {
    ForgetRecord(context_);
    CallFields call = record_->Fields();
    call.total = absl::Now() - call.begin;
    if (readers_.tracer != nullptr) readers_.tracer->Ended(call);
    if (readers_.log != nullptr) readers_.log->Write(std::move(call));
  }

  void Intercept(ge::InterceptorBatchMethods* methods) override {
    using Point = ge::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_INITIAL_METADATA)) {
      record_->Update([&](CallFields& call) {
        call.peer = context_->peer();
        call.trace = TraceOf(*context_);
        Caller caller = CallerOf(access_, *context_);
        call.identity = std::move(caller.identity);
        call.tenant = std::move(caller.tenant);
      });
    }
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS)) {
      const absl::Status status = FromGrpcStatus(methods->GetSendStatus());
      record_->Update([&](CallFields& call) {
        call.status = absl::StatusCodeToString(status.code());
        if (!status.ok()) call.reason = ReasonOf(status).value_or("");
      });
    }
    methods->Proceed();
  }

 private:
  const CallReaders readers_;
  const Access* const access_;
  const grpc::ServerContextBase* const context_;
  std::shared_ptr<CallRecord> record_;
};

class Factory : public ge::ServerInterceptorFactoryInterface {
 public:
  Factory(const CallReaders& readers, const Access* access) : readers_(readers), access_(access) {}
  ge::Interceptor* CreateServerInterceptor(ge::ServerRpcInfo* info) override {
    const bool logged = readers_.log != nullptr && AccessLog::Keeps(info->method());
    const bool traced = readers_.tracer != nullptr && !SpanName(info->method()).empty();
    if (!logged && !traced) return nullptr;
    return new Recorder({logged ? readers_.log : nullptr, traced ? readers_.tracer : nullptr},
                        access_, info);  // gRPC owns it
  }

 private:
  const CallReaders readers_;
  const Access* const access_;
};

}  // namespace

std::unique_ptr<ge::ServerInterceptorFactoryInterface> NewCallRecorder(const CallReaders& readers,
                                                                       const Access* access) {
  return std::make_unique<Factory>(readers, access);
}

}  // namespace sluice
