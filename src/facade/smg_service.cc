#include "src/facade/smg_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "facade/sglang_scheduler.grpc.pb.h"
#include "facade/vllm_engine.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/facade/abort.h"
#include "src/facade/sglang_dialect.h"
#include "src/facade/tokenizer_stream.h"
#include "src/facade/vllm_dialect.h"
#include "src/request/source_ref.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

namespace common = smg::grpc::common;

constexpr int kMaxAborts = 1024;

int32_t Int32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

// Names the messages of an engine's protocol, which are called the same in all of them.
#define SLUICE_SMG_MESSAGES(package)                            \
  using GenerateRequest = package::GenerateRequest;             \
  using GenerateResponse = package::GenerateResponse;           \
  using HealthCheckRequest = package::HealthCheckRequest;       \
  using HealthCheckResponse = package::HealthCheckResponse;     \
  using AbortRequest = package::AbortRequest;                   \
  using AbortResponse = package::AbortResponse;                 \
  using GetModelInfoRequest = package::GetModelInfoRequest;     \
  using GetModelInfoResponse = package::GetModelInfoResponse;   \
  using GetServerInfoRequest = package::GetServerInfoRequest;   \
  using GetServerInfoResponse = package::GetServerInfoResponse; \
  using GetLoadsRequest = package::GetLoadsRequest;             \
  using GetLoadsResponse = package::GetLoadsResponse

// The parts of an engine's service that the other engine's does not have under the same name.
// Returns what vLLM calls caches of this type, beside a model in bfloat16. The gateway pairs nodes
// whose words are the same, and a vLLM may be the other node.
std::string VllmKvDType(const std::string& kv_dtype) {
  if (kv_dtype == "bf16") return "auto";
  return kv_dtype == "fp8" ? "fp8_ds_mla" : kv_dtype;
}

struct VllmApi {
  using Service = vllm::grpc::engine::VllmEngine;
  SLUICE_SMG_MESSAGES(vllm::grpc::engine);

  static constexpr auto kNewDialect = NewVllmDialect;

  static absl::StatusOr<std::vector<std::string>> NamesOf(const AbortRequest& request) {
    if (request.request_ids_size() > kMaxAborts) {
      return InvalidField("request_ids", absl::StrCat("at most ", kMaxAborts, " entries, found ",
                                                      request.request_ids_size()));
    }
    for (int i = 0; i < request.request_ids_size(); ++i) {
      SLUICE_RETURN_IF_ERROR(
          CheckAbortName(absl::StrCat("request_ids[", i, "]"), request.request_ids(i)));
    }
    return std::vector<std::string>(request.request_ids().begin(), request.request_ids().end());
  }
  static void Answer(AbortResponse* /*response*/) {}

  static void Describe(const NodeInfo& info, GetServerInfoResponse* response) {
    const bool prefill = info.role == NodeInfo::Role::kPrefill;
    response->set_kv_connector(kSourceConnector);
    response->set_kv_role(prefill ? "kv_producer" : "kv_consumer");
    response->set_kv_engine_id(info.engine_id);
    response->set_data_parallel_size(1);
    response->set_kv_cache_dtype(VllmKvDType(info.kv_dtype));
    response->set_block_size(Int32(info.block_tokens));
    // attention_backend stays empty, which the gateway takes for any: a policy is no layout.
    response->set_model_dtype("torch.bfloat16");
    response->set_max_num_seqs(Int32(info.max_running));
  }
  static void Add(const NodeLoad& /*load*/, GetServerInfoResponse* /*response*/) {}
};

struct SglangApi {
  using Service = sglang::grpc::scheduler::SglangScheduler;
  SLUICE_SMG_MESSAGES(sglang::grpc::scheduler);

  static constexpr auto kNewDialect = NewSglangDialect;

  static absl::StatusOr<std::vector<std::string>> NamesOf(const AbortRequest& request) {
    SLUICE_RETURN_IF_ERROR(CheckAbortName("request_id", request.request_id()));
    return std::vector<std::string>{request.request_id()};
  }
  static void Answer(AbortResponse* response) { response->set_success(true); }

  static void Describe(const NodeInfo& info, GetServerInfoResponse* response) {
    const bool prefill = info.role == NodeInfo::Role::kPrefill;
    response->set_sglang_version(info.version);
    auto& args = *response->mutable_server_args()->mutable_fields();
    args["model_path"].set_string_value(info.model_path);
    args["tokenizer_path"].set_string_value(info.model_path);
    args["served_model_name"].set_string_value(info.served_model_name);
    args["disaggregation_mode"].set_string_value(prefill ? "prefill" : "decode");
    args["disaggregation_transfer_backend"].set_string_value(kSourceConnector);
    args["max_running_requests"].set_number_value(info.max_running);
    args["page_size"].set_number_value(info.block_tokens);
    args["context_length"].set_number_value(info.max_context);
    args["kv_cache_dtype"].set_string_value(info.kv_dtype);
    args["attention_backend"].set_string_value(info.policy);
    args["tp_size"].set_number_value(1);
    args["dp_size"].set_number_value(1);
  }
  static void Add(const NodeLoad& load, GetServerInfoResponse* response) {
    response->set_max_total_num_tokens(Int32(load.capacity_tokens));
  }
};

#undef SLUICE_SMG_MESSAGES

template <typename Api>
class SmgService final : public Api::Service::CallbackService {
 public:
  explicit SmgService(FacadeOptions options)
      : options_(std::move(options)),
        log_(RealClock(), options_.generate.log_prompts),
        tokenizer_(options_.info.model_path) {}

  grpc::ServerWriteReactor<typename Api::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const typename Api::GenerateRequest* request) override {
    return new GenerateReactor<typename Api::GenerateResponse>(
        options_.generate, &log_, context,
        Api::kNewDialect(options_.info.role, *request, options_.generate));
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context,
                                        const typename Api::HealthCheckRequest* /*request*/,
                                        typename Api::HealthCheckResponse* response) override {
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
                                  const typename Api::AbortRequest* request,
                                  typename Api::AbortResponse* response) override {
    absl::StatusOr<std::vector<std::string>> names = Api::NamesOf(*request);
    if (!names.ok()) return Done(context, names.status());
    Api::Answer(response);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (const TenantGate* gate = options_.generate.gate; gate != nullptr) {
      for (std::string& name : *names) name = gate->RequestId(*context, name);
    }
    AbortAll(options_.generate.generator, *names,
             [reactor](int /*found*/) { reactor->Finish(grpc::Status::OK); });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const typename Api::GetModelInfoRequest* /*request*/,
                                         typename Api::GetModelInfoResponse* response) override {
    const NodeInfo& info = options_.info;
    response->set_model_path(info.model_path);
    response->set_tokenizer_path(info.model_path);
    response->set_is_generation(true);
    response->set_max_context_length(Int32(info.max_context));
    response->set_vocab_size(Int32(info.vocab_size));
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
                                          const typename Api::GetServerInfoRequest* /*request*/,
                                          typename Api::GetServerInfoResponse* response) override {
    response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - options_.info.started));
    response->set_server_type(options_.info.role == NodeInfo::Role::kPrefill ? "sluice-prefill"
                                                                             : "sluice-server");
    Api::Describe(options_.info, response);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    options_.load([reactor, response](const NodeLoad& load) {
      response->set_active_requests(Int32(int64_t{load.running} + load.waiting));
      response->set_is_paused(load.draining);
      Api::Add(load, response);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* context,
                                     const typename Api::GetLoadsRequest* request,
                                     typename Api::GetLoadsResponse* response) override {
    if (request->dp_rank() != 0) {
      return Done(context,
                  InvalidField("dp_rank", absl::StrCat("must be 0, for there is one rank, found ",
                                                       request->dp_rank())));
    }
    response->set_timestamp(IsoTime(absl::Now()));
    response->set_version(options_.info.version);
    response->set_dp_rank_count(1);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    options_.load([reactor, response, max = options_.info.max_running](const NodeLoad& load) {
      auto* const out = response->add_loads();
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

GrpcService NewGatewayService(const std::string& gateway, FacadeOptions options) {
  const auto make = [&]<typename Api>(Api) -> GrpcService {
    return {Api::Service::service_full_name(),
            std::make_shared<SmgService<Api>>(std::move(options))};
  };
  if (gateway == "sglang") return make(SglangApi());
  SLUICE_CHECK(gateway == "vllm", "no gateway speaks to ", gateway);
  return make(VllmApi());
}

}  // namespace sluice
