#include "src/server/node.h"

#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/dtype.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/server/address_file.h"
#include "src/server/model_setup.h"
#include "src/server/program.h"
#include "src/server/tracing.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {

Node::~Node() { SLUICE_CHECK(grpc_ == nullptr, "a node closes its ports first"); }

absl::Status Node::StartUp() {
  const absl::Time start = absl::Now();
  SLUICE_ASSIGN_OR_RETURN(access_log_, OpenAccessLog(config_));
  SLUICE_ASSIGN_OR_RETURN(security_, SetUpSecurity(config_));
  OnSecurity();
  SLUICE_ASSIGN_OR_RETURN(spans_, NewSpanExporter(config_, security_.tls, program(), &metrics_));
  if (spans_ != nullptr) {
    tracer_ = std::make_unique<CallTracer>(spans_.get(), config_.otlp_sample_ratio());
  }
  SLUICE_RETURN_IF_ERROR(StartAdminHttp());
  SLUICE_RETURN_IF_ERROR(LoadModelAndMemory());
  if (absl::Status canary = RunCanary(); !canary.ok()) {
    if (!device_->Health().ok()) ExitWithin(kFlushTime + kEndTime);
    return canary;
  }
  SLUICE_RETURN_IF_ERROR(StartGrpc());
  Open();
  const std::string admin = admin_http_ == nullptr ? "" : admin_http_->address();
  if (!config_.address_file().empty()) {
    SLUICE_RETURN_IF_ERROR(WriteAddressFile(config_.address_file(), {grpc_->address(), admin}));
  }
  Log(LogLevel::kInfo, "ready",
      {{"listen", grpc_->address()},
       {"admin_listen", admin},
       {"model", model_->config().name},
       {"architecture", model_->config().architecture},
       {"device", device_->name()},
       {"kernels", device_->kernels().name()},
       {"threads", ThreadsOf(config_)},
       {"max_context", model_->max_context()},
       {"weight_bytes", model_->weight_bytes()},
       {"workspace_bytes", model_->workspace_bytes()},
       {"ready_after_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  return absl::OkStatus();
}

absl::Status Node::StartAdminHttp() {
  if (config_.admin_listen().empty()) return absl::OkStatus();
  AdminHttp::Options options;
  options.listen = config_.admin_listen();
  options.tls = security_.tls;
  options.access = security_.access();
  options.metrics = [this] { return RenderMetrics(); };
  options.ready = [this] { return readiness_.ready(); };
  absl::StatusOr<std::unique_ptr<AdminHttp>> started = AdminHttp::Start(std::move(options));
  if (!started.ok()) return WithMessagePrefix(started.status(), "admin_listen");
  admin_http_ = *std::move(started);
  return absl::OkStatus();
}

absl::Status Node::StartGrpc() {
  SLUICE_ASSIGN_OR_RETURN(std::vector<GrpcService> services, MakeServices());
  GrpcServer::Options options;
  options.listen = config_.listen();
  options.access_log = access_log_.get();
  options.tracer = tracer_.get();
  options.tls = security_.tls;
  options.access = security_.access();
  options.connections = {config_.max_connections(), config_.max_connections_per_peer()};
  options.max_receive_message_bytes = MaxMessageBytes();
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(options, std::move(services));
  if (!started.ok()) return WithMessagePrefix(started.status(), "listen");
  grpc_ = *std::move(started);
  counted_.store(grpc_.get());
  return absl::OkStatus();
}

std::string Node::RenderMetrics() {
  UpdateMetrics();
  if (GrpcServer* const grpc = counted_.load()) grpc->UpdateMetrics(metrics_);
  process_metrics_.Update(metrics_);
  return metrics_.Render();
}

absl::Status Node::LoadModel(int max_rows, int max_logits) {
  std::string why;
  SLUICE_ASSIGN_OR_RETURN(device_, NewDevice(config_, &why));
  Log(LogLevel::kInfo, "device chosen", {{"device", device_->name()}, {"why", why}});
  if (RanksOf(config_) > 1) {
    SLUICE_ASSIGN_OR_RETURN(ranks_,
                            JoinNodeRanks(&config_, device_.get(),
                                          {security_.tls, security_.access(), access_log_.get()}));
  }
  SLUICE_ASSIGN_OR_RETURN(
      model_, sluice::LoadModel(config_, max_rows, max_logits, device_.get(), ranks_.group.get()));
  return absl::OkStatus();
}

void Node::SetSize(const char* name, uint64_t bytes, const std::string& why,
                   void (Config::*set)(uint64_t)) {
  Log(LogLevel::kInfo, "memory for KV caches", {{"setting", name}, {"bytes", bytes}, {"why", why}});
  (config_.*set)(bytes);
}

void Node::SetCacheConfig(int64_t hbm_tokens, int64_t dram_tokens, bool prefix_cache) {
  const CacheKind& kind = model_->cache_layout().kinds.front();
  metrics_.SetCacheConfig({kind.block_tokens, hbm_tokens / kind.block_tokens,
                           dram_tokens / kind.block_tokens,
                           std::string(DTypeName(kind.element_type)), prefix_cache});
}

absl::Status Node::EndFailed() {
  const absl::Status health = device_->Health();
  readiness_.SetFailed(health);
  grpc_->SetServing(false);
  Log(LogLevel::kError, "ending: the device failed", {{"error", std::string(health.message())}});
  ExitWithin(kFlushTime + kEndTime);
  grpc_->Shutdown(kFlushTime);
  return health;
}

void Node::ClosePorts() {
  admin_http_.reset();
  counted_.store(nullptr);
  grpc_.reset();
}

}  // namespace sluice
