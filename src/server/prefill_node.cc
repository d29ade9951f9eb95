#include "src/server/prefill_node.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/facade/smg_service.h"
#include "src/server/address_file.h"
#include "src/server/model_setup.h"
#include "src/server/program.h"
#include "src/service/access/credentials.h"
#include "src/service/admin/prefill_admin_service.h"
#include "src/service/prefill/prefill_service.h"
#include "src/service/pull/source_service.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// Prompts are computed again elsewhere more cheaply than sequences are decoded again.
constexpr absl::Duration kGrace = absl::Seconds(30);
// For callers to take the error, after the device has failed.
constexpr absl::Duration kFailedGrace = absl::Seconds(5);

// Takes caches and forgets them.
class DiscardingSink : public LayerSink {
 public:
  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int, const CacheKind&, int, int,
                     absl::Span<const absl::Span<const uint8_t>>) override {
    return absl::OkStatus();
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillNode>> PrefillNode::Start(const Config& config) {
  const absl::Time start = absl::Now();
  std::unique_ptr<PrefillNode> node(new PrefillNode(config));
  SLUICE_ASSIGN_OR_RETURN(node->access_log_, OpenAccessLog(config));
  SLUICE_ASSIGN_OR_RETURN(node->security_, SetUpSecurity(config));
  node->channels_ = std::make_unique<Channels>(NewChannelCredentials(node->security_.tls));
  SLUICE_RETURN_IF_ERROR(node->StartAdminHttp());
  SLUICE_RETURN_IF_ERROR(node->LoadModelAndMemory());
  if (absl::Status canary = node->ComputeCanary(); !canary.ok()) {
    if (!node->device_->Health().ok()) ExitWithin(kFailedGrace);
    return canary;
  }
  SLUICE_RETURN_IF_ERROR(node->StartGrpc());
  node->readiness_.SetReady();
  node->grpc_->SetServing(true);
  const std::string admin = node->admin_http_ == nullptr ? "" : node->admin_http_->address();
  if (!config.address_file().empty()) {
    SLUICE_RETURN_IF_ERROR(
        WriteAddressFile(config.address_file(), {node->grpc_->address(), admin}));
  }
  Log(LogLevel::kInfo, "ready",
      {{"listen", node->grpc_->address()},
       {"admin_listen", admin},
       {"model", node->model_->config().name},
       {"architecture", node->model_->config().architecture},
       {"device", node->device_->name()},
       {"kernels", node->device_->kernels().name()},
       {"threads", ThreadsOf(config)},
       {"max_context", node->model_->max_context()},
       {"weight_bytes", node->model_->weight_bytes()},
       {"workspace_bytes", node->model_->workspace_bytes()},
       {"hbm_bytes", config.hbm_bytes()},
       {"ready_after_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  return node;
}

// Before the model: whoever probes sees a process that answers and is not ready yet.
absl::Status PrefillNode::StartAdminHttp() {
  if (config_.admin_listen().empty()) return absl::OkStatus();
  AdminHttp::Options options;
  options.listen = config_.admin_listen();
  options.tls = security_.tls;
  options.access = security_.access();
  options.metrics = [this] {
    if (GrpcServer* const grpc = counted_.load()) grpc->UpdateMetrics(metrics_);
    process_metrics_.Update(metrics_);
    return metrics_.Render();
  };
  options.ready = [this] { return readiness_.ready(); };
  absl::StatusOr<std::unique_ptr<AdminHttp>> started = AdminHttp::Start(std::move(options));
  if (!started.ok()) return WithMessagePrefix(started.status(), "admin_listen");
  admin_http_ = *std::move(started);
  return absl::OkStatus();
}

absl::Status PrefillNode::LoadModelAndMemory() {
  SLUICE_ASSIGN_OR_RETURN(device_, NewDevice(config_));
  // Layers go out in whole blocks, so a chunk is a number of them.
  const uint32_t block = config_.block_tokens();
  const uint32_t chunk = (config_.chunk_tokens() + block - 1) / block * block;
  SLUICE_ASSIGN_OR_RETURN(
      model_, LoadModel(config_, static_cast<int>(chunk), /*max_logits=*/1, device_.get()));
  Prefiller::Options options;
  metrics_.SetBuildInfo(
      {Version(), model_->config().name, device_->name(), device_->kernels().name(), ""});
  options.max_context = static_cast<uint32_t>(model_->max_context());
  options.chunk_tokens = chunk;
  options.seed = SeedOf(config_);
  options.hints = config_.hints();
  options.hbm_bytes = static_cast<int64_t>(config_.hbm_bytes());
  SLUICE_ASSIGN_OR_RETURN(prefiller_,
                          Prefiller::Create(options, device_.get(), model_.get(), RealClock()));
  if (config_.hold_bytes() > 0) {
    HeldPrompts::Options held;
    held.layout = model_->cache_layout();
    held.max_bytes = config_.hold_bytes();
    held.max_lease = absl::Seconds(config_.hold_seconds());
    held_ = std::make_unique<HeldPrompts>(std::move(held), prefiller_.get());
  }
  return absl::OkStatus();
}

absl::Status PrefillNode::ComputeCanary() {
  DiscardingSink sink;
  SamplingParams greedy;
  greedy.temperature = 0;
  const auto result =
      prefiller_->Run({0}, greedy, /*want_first_token=*/true, sink, [] { return false; });
  return WithMessagePrefix(result.status(), "the canary could not be computed");
}

absl::Status PrefillNode::StartGrpc() {
  PrefillServiceOptions service;
  *service.model.mutable_model() = MakeModelInfo(*model_);
  service.model.set_kernels(device_->kernels().name());
  service.prefiller = prefiller_.get();
  service.readiness = &readiness_;
  service.channels = channels_.get();
  service.access = security_.access();
  service.metrics = &metrics_;
  std::vector<GrpcService> services;
  service.held = held_.get();
  service.address = [this] {
    return config_.advertise().empty() ? grpc_->address() : config_.advertise();
  };
  service.counts = &counts_;
  const std::function<std::string()> address = service.address;
  services.push_back(NewPrefillService(std::move(service)));
  if (held_ != nullptr) {
    HoldingGenerator::Options holding;
    holding.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    holding.model_fingerprint = model_->fingerprint();
    holding.address = address;
    holding.held = held_.get();
    if (config_.gateway() == "sglang") holding.rooms = std::make_shared<Rooms>();
    const std::shared_ptr<Rooms> rooms = holding.rooms;
    holding.counts = &counts_;
    holding.readiness = &readiness_;
    const size_t most = static_cast<size_t>(holding.threads) + holding.max_queued;
    holding_ = std::make_unique<HoldingGenerator>(std::move(holding));
    FacadeOptions facade;
    SLUICE_ASSIGN_OR_RETURN(facade.info,
                            MakeNodeInfo(config_.model(), config_.served_model_name(), *model_));
    facade.info.role = NodeInfo::Role::kPrefill;
    facade.info.max_running = static_cast<uint32_t>(most);
    facade.info.version = Version();
    facade.load = [this](const auto& done) {
      NodeLoad load;
      const PromptCounts::Now now = counts_.now();
      const HeldPrompts::Usage held = held_->usage();
      load.running = static_cast<uint32_t>(now.running);
      load.waiting = static_cast<uint32_t>(now.waiting);
      load.usage = static_cast<double>(held.bytes) / static_cast<double>(held.max_bytes);
      load.draining = readiness_.draining();
      done(load);
    };
    facade.readiness = &readiness_;
    facade.generate.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    facade.generate.max_context = static_cast<uint32_t>(model_->max_context());
    facade.generate.generator = holding_.get();
    facade.generate.pump = &call_pump_;
    facade.generate.metrics = &metrics_;
    gate_.emplace(security_.access(), security_.file.get(), /*transfers=*/nullptr,
                  /*quotas=*/nullptr);
    facade.generate.gate = &*gate_;
    services.push_back(NewGatewayService(config_.gateway(), std::move(facade)));
    SourceServiceOptions source;
    source.model_fingerprint = model_->fingerprint();
    source.layout = model_->cache_layout();
    source.held = held_.get();
    source.rooms = rooms;
    source.access = security_.access();
    services.push_back(NewSourceService(std::move(source)));
  }
  PrefillAdminOptions admin;
  *admin.model.mutable_model() = MakeModelInfo(*model_);
  admin.model.set_device(device_->name());
  admin.model.set_kernels(device_->kernels().name());
  admin.model.set_version(Version());
  admin.readiness = &readiness_;
  admin.counts = &counts_;
  admin.held = held_.get();
  services.push_back(NewPrefillAdminService(std::move(admin)));
  GrpcServer::Options options;
  options.listen = config_.listen();
  options.access_log = access_log_.get();
  options.tls = security_.tls;
  options.access = security_.access();
  options.connections = {config_.max_connections(), config_.max_connections_per_peer()};
  options.max_receive_message_bytes =
      MaxPromptMessageBytes(static_cast<uint64_t>(model_->max_context()));
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(options, std::move(services));
  if (!started.ok()) return WithMessagePrefix(started.status(), "listen");
  grpc_ = *std::move(started);
  counted_.store(grpc_.get());
  return absl::OkStatus();
}

absl::Status PrefillNode::ServeUntil(Signals& signals) {
  signals.Serving();
  signals.WaitForStop([this] { return !device_->Health().ok(); });
  const absl::Status health = device_->Health();
  if (health.ok()) {
    readiness_.SetDraining(true);
  } else {
    readiness_.SetFailed(health);
    Log(LogLevel::kError, "ending: the device failed", {{"error", std::string(health.message())}});
    ExitWithin(kFailedGrace + absl::Seconds(1));
  }
  grpc_->SetServing(false);
  grpc_->Shutdown(!health.ok()          ? kFailedGrace
                  : signals.Count() > 1 ? absl::ZeroDuration()
                                        : kGrace);
  if (health.ok()) Log(LogLevel::kInfo, "stopped");
  return health;
}

}  // namespace sluice
