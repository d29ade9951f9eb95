#include "src/facade/vllm_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "facade/vllm_engine.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/facade/abort.h"
#include "src/facade/tokenizer_stream.h"
#include "src/facade/vllm_dialect.h"
#include "src/service/proto_conversion.h"
#include "src/service/status_mapping.h"
#include "src/service/tenant_gate.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;
namespace common = smg::grpc::common;

constexpr int kMaxAborts = 1024;

int32_t Int32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

class VllmService final : public ve::VllmEngine::CallbackService {
 public:
  explicit VllmService(FacadeOptions options)
      : options_(std::move(options)),
        log_(RealClock(), options_.generate.log_prompts),
        tokenizer_(options_.info.model_path) {}

  grpc::ServerWriteReactor<ve::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const ve::GenerateRequest* request) override {
    return new GenerateReactor<ve::GenerateResponse>(
        options_.generate, &log_, context,
        NewVllmDialect(options_.info.role, *request, options_.generate));
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context,
                                        const ve::HealthCheckRequest* /*request*/,
                                        ve::HealthCheckResponse* response) override {
    response->set_healthy(options_.readiness->ready());
    response->set_message(std::string(options_.readiness->CheckTakesWork().message()));
    return Done(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* FlushCache(grpc::CallbackServerContext* context,
                                       const common::FlushCacheRequest* request,
                                       common::FlushCacheResponse* response) override {
    if (!(request->timeout_s() >= 0)) {
      return Done(context, InvalidField("timeout_s",
                                        absl::StrCat("at least 0, found ", request->timeout_s())));
    }
    response->set_success(true);
    response->set_message("this node keeps no cache between requests");
    return Done(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const ve::AbortRequest* request,
                                  ve::AbortResponse* /*response*/) override {
    if (request->request_ids_size() > kMaxAborts) {
      return Done(context, InvalidField("request_ids",
                                        absl::StrCat("at most ", kMaxAborts, " entries, found ",
                                                     request->request_ids_size())));
    }
    for (int i = 0; i < request->request_ids_size(); ++i) {
      const absl::Status status =
          CheckAbortName(absl::StrCat("request_ids[", i, "]"), request->request_ids(i));
      if (!status.ok()) return Done(context, status);
    }
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::vector<std::string> names(request->request_ids().begin(), request->request_ids().end());
    if (const TenantGate* gate = options_.generate.gate; gate != nullptr) {
      for (std::string& name : names) name = gate->RequestId(*context, name);
    }
    AbortAll(options_.generate.generator, names,
             [reactor](int /*found*/) { reactor->Finish(grpc::Status::OK); });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const ve::GetModelInfoRequest* /*request*/,
                                         ve::GetModelInfoResponse* response) override {
    const NodeInfo& info = options_.info;
    response->set_model_path(info.model_path);
    response->set_tokenizer_path(info.model_path);
    response->set_is_generation(true);
    response->set_max_context_length(info.max_context);
    response->set_vocab_size(info.vocab_size);
    response->set_served_model_name(info.served_model_name);
    response->set_model_type(info.model_type);
    response->mutable_architectures()->Add(info.architectures.begin(), info.architectures.end());
    response->mutable_eos_token_ids()->Add(info.eos_token_ids.begin(), info.eos_token_ids.end());
    response->set_pad_token_id(info.pad_token_id);
    response->set_bos_token_id(info.bos_token_id);
    response->set_max_req_input_len(Int32(info.max_context));
    return Done(context, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const ve::GetServerInfoRequest* /*request*/,
                                          ve::GetServerInfoResponse* response) override {
    const NodeInfo& info = options_.info;
    const bool prefill = info.role == NodeInfo::Role::kPrefill;
    response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - info.started));
    response->set_server_type(prefill ? "sluice-prefill" : "sluice-server");
    response->set_kv_connector(kConnector);
    response->set_kv_role(prefill ? "kv_producer" : "kv_consumer");
    response->set_kv_engine_id(info.engine_id);
    response->set_data_parallel_size(1);
    response->set_kv_cache_dtype(info.kv_dtype);
    response->set_block_size(Int32(info.block_tokens));
    response->set_attention_backend(info.policy);
    response->set_model_dtype("torch.bfloat16");
    response->set_max_num_seqs(Int32(info.max_running));
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    options_.load([reactor, response](const NodeLoad& load) {
      response->set_active_requests(load.running + load.waiting);
      response->set_is_paused(load.draining);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* context,
                                     const ve::GetLoadsRequest* request,
                                     ve::GetLoadsResponse* response) override {
    if (request->dp_rank() != 0) {
      return Done(context, InvalidField("dp_rank", absl::StrCat("only 0 is here, found ",
                                                                request->dp_rank())));
    }
    response->set_timestamp(IsoTime(absl::Now()));
    response->set_version(options_.info.version);
    response->set_dp_rank_count(1);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    options_.load([reactor, response, max = options_.info.max_running](const NodeLoad& load) {
      ve::SchedulerLoad* out = response->add_loads();
      out->set_num_running_reqs(Int32(load.running));
      out->set_num_waiting_reqs(Int32(load.waiting));
      out->set_num_total_reqs(Int32(int64_t{load.running} + load.waiting));
      out->set_num_used_tokens(Int32(load.used_tokens));
      out->set_max_total_num_tokens(Int32(load.capacity_tokens));
      out->set_token_usage(load.usage);
      out->set_gen_throughput(load.tokens_per_second);
      out->set_utilization(static_cast<double>(load.running) / max);
      out->set_max_running_requests(Int32(max));
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerWriteReactor<common::GetTokenizerChunk>* GetTokenizer(
      grpc::CallbackServerContext* /*context*/,
      const common::GetTokenizerRequest* /*request*/) override {
    return tokenizer_.Stream();
  }

 private:
  static grpc::ServerUnaryReactor* Done(grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  const FacadeOptions options_;
  RequestLog log_;
  TokenizerStreams tokenizer_;
};

}  // namespace

GrpcService NewVllmService(FacadeOptions options) {
  return {ve::VllmEngine::service_full_name(), std::make_shared<VllmService>(std::move(options))};
}

}  // namespace sluice
