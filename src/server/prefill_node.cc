#include "src/server/prefill_node.h"

#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/facade/smg_service.h"
#include "src/server/kv_links.h"
#include "src/server/model_setup.h"
#include "src/service/access/credentials.h"
#include "src/service/admin/prefill_admin_service.h"
#include "src/service/prefill/prefill_service.h"
#include "src/service/pull/source_service.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// This is short: to compute a prompt again elsewhere is cheaper than to decode a sequence again.
constexpr absl::Duration kGrace = absl::Seconds(30);

// Takes the layers of a KV cache and forgets them.
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
  std::unique_ptr<PrefillNode> node(new PrefillNode(config));
  SLUICE_RETURN_IF_ERROR(node->StartUp());
  return node;
}

absl::Status PrefillNode::LoadModelAndMemory() {
  channels_ = std::make_unique<Channels>(NewChannelCredentials(security_.tls));
  // Layers are sent in whole blocks, so a chunk is a number of blocks.
  const uint32_t block = config_.block_tokens();
  const uint32_t chunk = (config_.chunk_tokens() + block - 1) / block * block;
  SLUICE_RETURN_IF_ERROR(LoadModel(static_cast<int>(chunk), /*max_logits=*/1));
  metrics_.SetBuildInfo(
      {Version(), model_->config().name, device_->name(), device_->kernels().name(), ""});
  SLUICE_RETURN_IF_ERROR(ChooseSizes());
  const int64_t block_bytes = model_->cache_layout().BytesFor(block);
  SetCacheConfig(static_cast<int64_t>(config_.hbm_bytes()) / block_bytes * block,
                 static_cast<int64_t>(config_.hold_bytes()) / block_bytes * block,
                 config_.prefix_cache());
  Prefiller::Options options;
  options.max_context = static_cast<uint32_t>(model_->max_context());
  options.chunk_tokens = chunk;
  options.seed = SeedOf(config_);
  options.hints = config_.hints();
  options.prefix_cache = config_.prefix_cache();
  options.metrics = &metrics_;
  options.hbm_bytes = static_cast<int64_t>(config_.hbm_bytes());
  SLUICE_ASSIGN_OR_RETURN(prefiller_,
                          Prefiller::Create(options, device_.get(), model_.get(), RealClock()));
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<PeerLinks> links,
                          NewKvLinks(config_, device_.get()));
  if (links != nullptr) {
    LinkPeers::Options pushes;
    pushes.links = links;
    pushes.sends = true;
    pushes.deadline = absl::Seconds(config_.kv_transport_deadline_seconds());
    push_links_ = std::make_unique<LinkPeers>(std::move(pushes));
  }
  if (config_.hold_bytes() > 0) {
    HeldPrompts::Options held;
    held.layout = model_->cache_layout();
    held.max_bytes = config_.hold_bytes();
    held.max_lease = absl::Seconds(config_.hold_seconds());
    Buffer arena;
    if (links != nullptr) {
      SLUICE_ASSIGN_OR_RETURN(arena, device_->Allocate(MemoryKind::kPinned, held.max_bytes,
                                                       "held prompts (hold_bytes)"));
      LinkServer::Options pulls;
      pulls.links = links;
      pulls.sends = true;
      pulls.deadline = absl::Seconds(config_.kv_transport_deadline_seconds());
      pull_links_ = std::make_unique<LinkServer>(std::move(pulls));
    }
    held_ = std::make_unique<HeldPrompts>(std::move(held), prefiller_.get(), std::move(arena));
  }
  return absl::OkStatus();
}

absl::Status PrefillNode::ChooseSizes() {
  SLUICE_ASSIGN_OR_RETURN(const MemoryFound found, FindMemory(config_, *device_));
  const CacheSize hbm =
      PrefillHbmSize(config_.hbm_bytes(), found, model_->cache_layout(), model_->max_context());
  const CacheSize hold = HoldSize(config_.hold_bytes(), found);
  SetSize("hbm_bytes", hbm.bytes, hbm.why, &Config::set_hbm_bytes);
  SetSize("hold_bytes", hold.bytes, hold.why, &Config::set_hold_bytes);
  return absl::OkStatus();
}

absl::Status PrefillNode::RunCanary() {
  DiscardingSink sink;
  SamplingParams greedy;
  greedy.temperature = 0;
  const auto result =
      prefiller_->Run({0}, greedy, /*want_first_token=*/true, sink, [] { return false; });
  return WithMessagePrefix(result.status(), "the canary could not be computed");
}

std::string PrefillNode::Address() const {
  return config_.advertise().empty() ? grpc_->address() : config_.advertise();
}

absl::StatusOr<std::vector<GrpcService>> PrefillNode::MakeServices() {
  PrefillServiceOptions service;
  *service.model.mutable_model() = MakeModelInfo(*model_);
  service.model.set_kernels(device_->kernels().name());
  service.prefiller = prefiller_.get();
  service.readiness = &readiness_;
  service.channels = channels_.get();
  service.access = security_.access();
  service.metrics = &metrics_;
  service.held = held_.get();
  service.links = push_links_.get();
  service.address = [this] { return Address(); };
  service.counts = &counts_;
  std::vector<GrpcService> services;
  services.push_back(NewPrefillService(std::move(service)));
  if (held_ != nullptr) SLUICE_RETURN_IF_ERROR(AddHoldingServices(&services));
  PrefillAdminOptions admin;
  *admin.model.mutable_model() = MakeModelInfo(*model_);
  admin.model.set_device(device_->name());
  admin.model.set_kernels(device_->kernels().name());
  admin.model.set_version(Version());
  admin.readiness = &readiness_;
  admin.counts = &counts_;
  admin.held = held_.get();
  services.push_back(NewPrefillAdminService(std::move(admin)));
  return services;
}

absl::Status PrefillNode::AddHoldingServices(std::vector<GrpcService>* services) {
  std::shared_ptr<Rooms> rooms;
  if (config_.gateway() == "sglang") rooms = std::make_shared<Rooms>();
  HoldingGenerator::Options holding;
  holding.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  holding.model_fingerprint = model_->fingerprint();
  holding.address = [this] { return Address(); };
  holding.held = held_.get();
  holding.rooms = rooms;
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
  services->push_back(NewGatewayService(config_.gateway(), std::move(facade)));

  SourceServiceOptions source;
  source.model_fingerprint = model_->fingerprint();
  source.layout = model_->cache_layout();
  source.held = held_.get();
  source.links = pull_links_.get();
  source.rooms = rooms;
  source.access = security_.access();
  services->push_back(NewSourceService(std::move(source)));
  return absl::OkStatus();
}

uint64_t PrefillNode::MaxMessageBytes() const {
  return MaxPromptMessageBytes(static_cast<uint64_t>(model_->max_context()));
}

void PrefillNode::Open() {
  readiness_.SetReady();
  grpc_->SetServing(true);
}

absl::Status PrefillNode::ServeUntil(Signals& signals) {
  signals.Serving();
  signals.WaitForStop([this] { return !device_->Health().ok(); });
  if (!device_->Health().ok()) return EndFailed();
  readiness_.SetDraining(true);
  grpc_->SetServing(false);
  grpc_->Shutdown(signals.Count() > 1 ? absl::ZeroDuration() : kGrace);
  Log(LogLevel::kInfo, "stopped");
  return absl::OkStatus();
}

}  // namespace sluice
