#include "src/service/admin/prefill_admin_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

absl::Status NotHere(const char* call) {
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        call,
                        ": this is a prefill node (sluice-prefill), which answers GetModel "
                        "and GetCapacity alone; ask the decode node (sluice-server)")),
                    reasons::kPrefillNode);
}

class RefusingTrace : public grpc::ServerWriteReactor<v1::TraceResponse> {
 public:
  RefusingTrace() { Finish(ToGrpcStatus(NotHere("Trace"))); }
  void OnDone() override { delete this; }
};

class PrefillAdminService final : public v1::Admin::CallbackService {
 public:
  explicit PrefillAdminService(PrefillAdminOptions options) : options_(std::move(options)) {
    options_.model.set_role("prefill");
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* /*request*/,
                                     v1::GetModelResponse* response) override {
    *response = options_.model;
    return Answer(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* GetCapacity(grpc::CallbackServerContext* context,
                                        const v1::GetCapacityRequest* /*request*/,
                                        v1::GetCapacityResponse* response) override {
    const PromptCounts::Now now = options_.counts->now();
    response->set_running(static_cast<uint32_t>(now.running));
    response->set_waiting(static_cast<uint32_t>(now.waiting));
    response->set_draining(options_.readiness->draining());
    response->set_ready(options_.readiness->ready());
    v1::HeldCapacity* const held = response->mutable_held();
    if (options_.held != nullptr) {
      const HeldPrompts::Usage usage = options_.held->usage();
      held->set_capacity_bytes(usage.max_bytes);
      held->set_used_bytes(usage.bytes);
      held->set_prompts(static_cast<uint32_t>(usage.prompts));
      held->set_expired(usage.expired);
    }
    return Answer(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* /*request*/,
                                          v1::ListSequencesResponse* /*response*/) override {
    return Answer(context, NotHere("ListSequences"));
  }
  grpc::ServerUnaryReactor* ListFailpoints(grpc::CallbackServerContext* context,
                                           const v1::ListFailpointsRequest* /*request*/,
                                           v1::ListFailpointsResponse* /*response*/) override {
    return Answer(context, NotHere("ListFailpoints"));
  }
  grpc::ServerUnaryReactor* SetFailpoints(grpc::CallbackServerContext* context,
                                          const v1::SetFailpointsRequest* /*request*/,
                                          v1::SetFailpointsResponse* /*response*/) override {
    return Answer(context, NotHere("SetFailpoints"));
  }
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* /*request*/,
                                  v1::DrainResponse* /*response*/) override {
    return Answer(context, NotHere("Drain"));
  }
  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context,
                                   const v1::ResumeRequest* /*request*/,
                                   v1::ResumeResponse* /*response*/) override {
    return Answer(context, NotHere("Resume"));
  }
  grpc::ServerWriteReactor<v1::TraceResponse>* Trace(grpc::CallbackServerContext* /*context*/,
                                                     const v1::TraceRequest* /*request*/) override {
    return new RefusingTrace;  // deletes itself
  }

 private:
  static grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                          const absl::Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  PrefillAdminOptions options_;
};

}  // namespace

GrpcService NewPrefillAdminService(PrefillAdminOptions options) {
  return {v1::Admin::service_full_name(),
          std::make_shared<PrefillAdminService>(std::move(options))};
}

}  // namespace sluice
