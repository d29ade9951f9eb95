#include "src/service/prefill/prefill_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "sluice/v1/prefill.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/sampling/sampling_params.h"
#include "src/service/grpc/channels.h"
#include "src/service/prefill/handoff.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/host_port.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {
namespace {

class RunReactor : public grpc::ServerUnaryReactor {
 public:
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { delete this; }
  bool cancelled() const { return cancelled_.load(); }

 private:
  std::atomic<bool> cancelled_ = false;
};

absl::Duration FromProtoDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

// Returns the stages of a call that has lasted for `total` and waited for `waited` for its thread.
// A push begins with the first layer, so it lies beside the computation and ends the call.
std::vector<CallStage> StagesOf(const v1::RunResponse& response, absl::Duration total,
                                absl::Duration waited) {
  const v1::RunResponse::Timings& timings = response.timings();
  const absl::Duration began = std::min(waited + FromProtoDuration(timings.queued()), total);
  std::vector<CallStage> stages = {{"queue", absl::ZeroDuration(), began}};
  const absl::Duration compute = FromProtoDuration(timings.compute());
  if (compute > absl::ZeroDuration()) {
    stages.push_back({"first_token", began, std::min(began + compute, total)});
  }
  const absl::Duration push = FromProtoDuration(timings.push());
  if (push > absl::ZeroDuration()) stages.push_back({"transfer", total - push, total});
  return stages;
}

class PrefillService final : public v1::Prefill::CallbackService {
 public:
  explicit PrefillService(PrefillServiceOptions options)
      : options_(std::move(options)),
        workers_("prefill-rpc", options_.threads, options_.max_queued) {}

  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const v1::RunRequest* request,
                                v1::RunResponse* response) override {
    auto* reactor = new RunReactor;  // deletes itself
    const absl::Time arrived = absl::Now();
    absl::StatusOr<Handoff::Options> handoff = Check(*request, CallerOf(options_.access, *context));
    if (!handoff.ok()) {
      Refuse(reactor, handoff.status());
      return reactor;
    }
    handoff->parent = context;
    handoff->cancelled = [reactor] { return reactor->cancelled(); };
    // The job is shared because std::function must be able to copy what it holds.
    auto job = std::make_shared<Handoff::Options>(*std::move(handoff));
    options_.counts->Queued();
    const bool taken = workers_.TryPost([this, reactor, response, arrived, job] {
      const size_t tokens = job->prompt.size();
      options_.counts->Begun(arrived);
      const absl::Status status =
          Guarded("Run", [&] { return Work(std::move(*job), arrived, response); });
      options_.counts->Ended(status, tokens, arrived);
      reactor->Finish(ToGrpcStatus(status));
    });
    if (!taken) {
      options_.counts->Left();
      Refuse(reactor, ResourceExhausted(
                          reasons::kQueueFull,
                          absl::StrCat("more than ", options_.max_queued,
                                       " prompts wait: try again, or use another prefill node"),
                          absl::Seconds(1)));
    }
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetPrefillModelRequest* /*request*/,
                                     v1::GetPrefillModelResponse* response) override {
    *response = options_.model;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  absl::StatusOr<Handoff::Options> Check(const v1::RunRequest& request, const Caller& caller) {
    SLUICE_RETURN_IF_ERROR(options_.readiness->CheckTakesWork());
    const v1::ModelInfo& model = options_.model.model();
    Handoff::Options out;
    if (request.prompt_token_ids().empty()) return InvalidField("prompt_token_ids", "is empty");
    SLUICE_ASSIGN_OR_RETURN(out.prompt, TokenIds("prompt_token_ids", request.prompt_token_ids(),
                                                 model.vocab_size(), model.max_context()));
    SLUICE_ASSIGN_OR_RETURN(out.sampling, FromProto(request.sampling()));
    // The decode node judges stop strings, because only it matches them.
    SLUICE_RETURN_IF_ERROR(ValidateSamplingParams(out.sampling, model.vocab_size(),
                                                  /*stop_strings_supported=*/true));
    SLUICE_RETURN_IF_ERROR(CheckName("rendezvous_key", request.rendezvous_key()));
    SLUICE_RETURN_IF_ERROR(CheckName("tenant", request.tenant()));
    SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantFor(caller, request.tenant()));
    if (request.decode_address().empty()) {
      if (options_.held == nullptr) {
        return InvalidField("decode_address",
                            "is empty, and this node holds no prompts: give it "
                            "hold_bytes, or say where the caches go");
      }
      if (!request.rendezvous_key().empty()) {
        return InvalidField("rendezvous_key",
                            "names a transfer at a decode node: give its address "
                            "in decode_address, or leave both out");
      }
    } else {
      const absl::StatusOr<HostPort> address = ParseHostPort(request.decode_address());
      if (!address.ok() || address->port == 0) {
        return InvalidField("decode_address", address.ok()
                                                  ? "port 0 cannot be called"
                                                  : std::string(address.status().message()));
      }
      out.decode_address = address->ToString();
    }

    v1::Manifest* manifest = out.reserve.mutable_manifest();
    manifest->set_model_fingerprint(model.fingerprint());
    *manifest->mutable_cache_kinds() = model.cache_kinds();
    manifest->set_context_length(static_cast<uint32_t>(out.prompt.size()));
    *manifest->mutable_prompt_token_ids() = request.prompt_token_ids();
    const auto left = model.max_context() - static_cast<uint32_t>(out.prompt.size());
    manifest->set_max_new_tokens(out.sampling.max_tokens.value_or(std::max(left, 1u)));
    manifest->set_tenant(tenant);
    out.reserve.set_rendezvous_key(request.rendezvous_key());

    out.want_first_token = !request.skip_first_token();
    out.prefiller = options_.prefiller;
    out.call_timeout = options_.call_timeout;
    out.push_timeout = options_.push_timeout;
    out.max_kept_bytes = options_.max_kept_bytes;
    out.links = options_.links;
    out.metrics = options_.metrics;
    return out;
  }

  void Refuse(RunReactor* reactor, const absl::Status& status) {
    options_.metrics->requests(RequestOutcome::kRefused, ReasonLabel(status)).Add();
    reactor->Finish(ToGrpcStatus(status));
  }

  absl::Status Work(Handoff::Options options, absl::Time arrived, v1::RunResponse* response) {
    if (options.cancelled()) return absl::CancelledError("the caller is gone or has cancelled");
    const absl::Duration waited = absl::Now() - arrived;
    const grpc::CallbackServerContext& context = *options.parent;
    NoteCall(context, [&](CallFields& call) {
      call.queued = waited;
      call.prompt_tokens = options.prompt.size();
    });
    absl::Status status;
    if (options.decode_address.empty()) {
      status = Hold(options, response);
    } else {
      options.channel = options_.channels->Get(options.decode_address);
      options.channel_to = [channels = options_.channels](const std::string& address) {
        return channels->Get(address);
      };
      status = Handoff(std::move(options)).Run(response);
    }
    NoteCall(context, [&](CallFields& call) {
      call.transfer_id = response->transfer_id();
      call.bytes = response->timings().bytes_pushed();
      call.output_tokens = response->has_first_token() ? 1 : 0;
      call.stages = StagesOf(*response, absl::Now() - call.begin, waited);
    });
    SLUICE_RETURN_IF_ERROR(status);
    v1::RunResponse::Timings* timings = response->mutable_timings();
    *timings->mutable_queued() = ToProto(absl::Seconds(timings->queued().seconds()) +
                                         absl::Nanoseconds(timings->queued().nanos()) + waited);
    *timings->mutable_total() = ToProto(absl::Now() - arrived);
    return absl::OkStatus();
  }

  // Computes the prompt and holds it here. The answer says where.
  absl::Status Hold(const Handoff::Options& options, v1::RunResponse* response) {
    HeldPrompts::Wanted wanted{options.prompt, options.sampling, options.want_first_token,
                               options.reserve.manifest().tenant(), /*request_id=*/""};
    SLUICE_ASSIGN_OR_RETURN(const HeldPrompts::Held held,
                            options_.held->Hold(wanted, options.cancelled));
    const SourceRef source{options_.address(), held.prompt->source_id, held.prompt->prompt_digest,
                           options_.model.model().fingerprint()};
    *response->mutable_source() = ToProto(source);
    *response->mutable_source()->mutable_lease() = ToProto(held.lease);
    if (held.prompt->first_token.has_value()) {
      *response->mutable_first_token() = ToProto(*held.prompt->first_token);
    }
    *response->mutable_timings()->mutable_queued() = ToProto(held.queued);
    *response->mutable_timings()->mutable_compute() = ToProto(held.compute);
    return absl::OkStatus();
  }

  const PrefillServiceOptions options_;
  WorkerQueue workers_;  // last: its threads use the rest
};

}  // namespace

GrpcService NewPrefillService(PrefillServiceOptions options) {
  return {v1::Prefill::service_full_name(), std::make_shared<PrefillService>(std::move(options))};
}

}  // namespace sluice
