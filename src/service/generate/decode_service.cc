#include "src/service/generate/decode_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "sluice/v1/decode.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/generate/generate_reactor.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

class SluiceDialect final : public GenerateDialectOf<v1::GenerateResponse> {
 public:
  SluiceDialect(const v1::GenerateRequest& request, const GenerateOptions& options)
      : request_(request), options_(options) {}

  std::string request_id() const override { return request_.request_id(); }
  absl::StatusOr<Request> Read() override {
    return FromProto(request_, options_.vocab_size, options_.max_context);
  }
  absl::Status Translated(const absl::Status& status) const override { return status; }
  void Begin(const std::string& request_id) override { request_id_ = request_id; }

  bool SetTokens(absl::Span<const OutputToken> tokens) override {
    Clear();
    for (const OutputToken& token : tokens) *message()->add_tokens() = ToProto(token);
    return true;
  }
  bool EndHasTokens() const override { return true; }
  bool SetEnd(const FinishInfo& end, bool add) override {
    if (end.reason == FinishInfo::Reason::kError) return false;
    if (!add) Clear();
    *message()->mutable_finish() = ToProto(end);
    return true;
  }

 private:
  void Clear() {
    message()->Clear();
    message()->set_request_id(request_id_);
  }

  const v1::GenerateRequest& request_;  // gRPC keeps it as long as the call
  const GenerateOptions& options_;
  std::string request_id_;
};

class DecodeService final : public v1::Decode::CallbackService {
 public:
  explicit DecodeService(const DecodeServiceOptions& options)
      : options_(options), log_(RealClock(), options.generate.log_prompts) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return new GenerateReactor<v1::GenerateResponse>(
        options_.generate, &log_, context,
        std::make_unique<SluiceDialect>(*request, options_.generate));
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
    const TenantGate* gate = options_.generate.gate;
    options_.engine->CancelRequest(
        gate == nullptr ? request->request_id() : gate->RequestId(*context, request->request_id()),
        WithReason(absl::CancelledError("cancelled by Cancel"), reasons::kCancelCall),
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
      const TenantGate* gate = options_.generate.gate;
      const absl::StatusOr<std::string> tenant =
          TenantFor(gate == nullptr ? Caller() : gate->CallerOf(*context), request->tenant());
      status = tenant.status();
      if (status.ok()) {
        response->set_found(options_.engine->Forget(request->sequence_id(), *tenant));
      }
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
