#include "src/service/admin/admin_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/admin/trace_reactor.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {
namespace {

constexpr size_t kMaxTermsBytes = 4096;
constexpr uint32_t kDefaultLimit = 1000;
constexpr absl::Duration kMaxDrain = absl::Hours(24);
constexpr uint32_t kMaxLimit = 10000;  // entries of about 350 bytes, with full names: 3.5 MB

class AdminService final : public v1::Admin::CallbackService {
 public:
  explicit AdminService(AdminServiceOptions options) : options_(std::move(options)) {
    options_.model.set_role("decode");
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* /*request*/,
                                     v1::GetModelResponse* response) override {
    *response = options_.model;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* GetCapacity(grpc::CallbackServerContext* context,
                                        const v1::GetCapacityRequest* /*request*/,
                                        v1::GetCapacityResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    options_.engine->Snapshot([this, reactor, response](const EngineSnapshot& snapshot) {
      FillCapacity(snapshot, response);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const uint32_t limit = request->limit() == 0 ? kDefaultLimit : request->limit();
    if (limit > kMaxLimit) {
      reactor->Finish(ToGrpcStatus(
          InvalidField("limit", absl::StrCat("at most ", kMaxLimit, ", found ", limit))));
      return reactor;
    }
    options_.engine->Snapshot([reactor, response, limit](const EngineSnapshot& snapshot) {
      const size_t count = std::min<size_t>(limit, snapshot.sequences.size());
      for (size_t i = 0; i < count; ++i) {
        *response->add_sequences() = ToProto(snapshot.sequences[i]);
      }
      response->set_total(static_cast<uint32_t>(snapshot.sequences.size()));
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListFailpoints(grpc::CallbackServerContext* context,
                                           const v1::ListFailpointsRequest* /*request*/,
                                           v1::ListFailpointsResponse* response) override {
    for (const FailpointState& state : sluice::ListFailpoints()) {
      const FailpointInfo& info = InfoOf(state.point);
      v1::Failpoint* out = response->add_failpoints();
      out->set_name(info.name);
      out->set_effect(info.effect);
      out->set_survives(info.survives);
      if (state.term.action != FailpointTerm::Action::kOff) {
        out->set_term(FormatFailpoint(state.term));
      }
      out->set_armed(state.armed);
      out->set_hits(state.hits);
      out->set_fired(state.fired);
    }
    response->set_allowed(options_.allow_failpoints);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* SetFailpoints(grpc::CallbackServerContext* context,
                                          const v1::SetFailpointsRequest* request,
                                          v1::SetFailpointsResponse* /*response*/) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(DoSetFailpoints(*request)));
    return reactor;
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::optional<absl::Duration> timeout;
    if (request->has_timeout()) {
      const auto given = DurationUpTo("timeout", request->timeout(), kMaxDrain);
      if (!given.ok()) {
        reactor->Finish(ToGrpcStatus(given.status()));
        return reactor;
      }
      timeout = *given;
    }
    const DrainControl::Drained drained = options_.drain->Drain(timeout);
    response->set_was_draining(drained.was_draining);
    *response->mutable_timeout() = ToProto(drained.timeout);
    options_.engine->Snapshot([reactor, response](const EngineSnapshot& snapshot) {
      response->set_running(snapshot.running);
      response->set_waiting(snapshot.waiting);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerWriteReactor<v1::TraceResponse>* Trace(grpc::CallbackServerContext* /*context*/,
                                                     const v1::TraceRequest* request) override {
    return NewTraceReactor(options_.engine, options_.recorder, &workers_, *request);
  }

  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context,
                                   const v1::ResumeRequest* /*request*/,
                                   v1::ResumeResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<bool> was_draining = options_.drain->Resume();
    response->set_was_draining(was_draining.value_or(true));
    reactor->Finish(ToGrpcStatus(was_draining.status()));
    return reactor;
  }

 private:
  absl::Status DoSetFailpoints(const v1::SetFailpointsRequest& request) const {
    if (!options_.allow_failpoints) {
      return WithReason(absl::FailedPreconditionError(
                            "faults are not injected here: the node was started without "
                            "--allow-failpoints"),
                        reasons::kFailpointsNotAllowed);
    }
    if (request.terms().size() > kMaxTermsBytes) {
      return InvalidField("terms", absl::StrCat("at most ", kMaxTermsBytes, " bytes, found ",
                                                request.terms().size()));
    }
    // The terms are checked before anything changes.
    if (const absl::Status status = ParseFailpoints(request.terms()).status(); !status.ok()) {
      return InvalidField("terms", std::string(status.message()));
    }
    if (request.clear()) DisarmFailpoints();
    SLUICE_RETURN_IF_ERROR(ArmFailpoints(request.terms(), request.seed()));
    Log(LogLevel::kWarn, "failpoints were set",
        {{"terms", request.terms()}, {"seed", request.seed()}, {"clear", request.clear()}});
    return absl::OkStatus();
  }

  void FillCapacity(const EngineSnapshot& snapshot, v1::GetCapacityResponse* response) const {
    for (const std::vector<const PagePool*>& pools : {options_.dram, options_.hbm}) {
      const PagePool& one = *pools.front();
      for (size_t kind = 0; kind < one.layout().kinds.size(); ++kind) {
        const PagePool::Usage usage = PagePool::UsageOf(pools, kind);
        v1::TierCapacity* tier = response->add_tiers();
        tier->set_tier(one.name());
        tier->set_kind(one.layout().kinds[kind].name);
        tier->set_capacity_bytes(static_cast<uint64_t>(usage.capacity_bytes));
        tier->set_reserved_bytes(static_cast<uint64_t>(usage.reserved_bytes));
        tier->set_used_bytes(static_cast<uint64_t>(usage.used_bytes));
      }
    }
    response->set_max_sequences(options_.max_sequences);
    response->set_running(snapshot.running);
    response->set_waiting(snapshot.waiting);
    response->set_transfers(static_cast<uint32_t>(options_.transfers->open_transfers()));
    response->set_draining(snapshot.draining);
    response->set_ready(options_.drain->ready());
  }

  // Maximum traces that are made or wait.
  static constexpr size_t kMaxTraces = 4;

  AdminServiceOptions options_;
  WorkerQueue workers_{"admin", 1, kMaxTraces};  // last: its thread uses the rest
};

}  // namespace

GrpcService NewAdminService(AdminServiceOptions options) {
  return {v1::Admin::service_full_name(), std::make_shared<AdminService>(std::move(options))};
}

}  // namespace sluice
