#include "src/server/decode_node.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/facade/smg_service.h"
#include "src/kv/selection_hints.h"
#include "src/server/address_file.h"
#include "src/server/model_setup.h"
#include "src/server/program.h"
#include "src/service/access/credentials.h"
#include "src/service/admin/admin_service.h"
#include "src/service/generate/decode_service.h"
#include "src/service/grpc/channels.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/pull/puller.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

constexpr absl::Duration kCanaryTimeout = absl::Minutes(5);
// For callers to take their last messages, after every sequence has ended.
constexpr absl::Duration kFlushTime = absl::Seconds(5);
// For the engine to end what the time to drain has left.
constexpr absl::Duration kEndTime = absl::Seconds(1);

// Of one with a chunk or with hints, which is what other nodes send, unasked or when they are read.
uint64_t MaxMessageBytes(uint64_t max_chunk_bytes, const AttentionPolicy& policy) {
  return std::max(MaxChunkMessageBytes(max_chunk_bytes),
                  policy.hint_tokens() > 0 ? uint64_t{kMaxHintMessageBytes} : 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeNode>> DecodeNode::Start(const Config& config) {
  const absl::Time start = absl::Now();
  std::unique_ptr<DecodeNode> node(new DecodeNode(config));
  SLUICE_ASSIGN_OR_RETURN(node->access_log_, OpenAccessLog(config));
  SLUICE_ASSIGN_OR_RETURN(node->security_, SetUpSecurity(config));
  if (node->security_.file != nullptr) {
    node->security_.file->OnTenants(
        [quotas = &node->quotas_](const auto& all) { quotas->Set(all); });
  }
  SLUICE_RETURN_IF_ERROR(node->StartAdminHttp());
  SLUICE_RETURN_IF_ERROR(node->LoadModelAndMemory());
  SLUICE_RETURN_IF_ERROR(node->StartEngine());
  if (absl::Status canary = node->DecodeCanary(); !canary.ok()) {
    if (!node->device_->Health().ok()) ExitWithin(kFlushTime + kEndTime);
    return canary;
  }
  SLUICE_RETURN_IF_ERROR(node->StartGrpc());
  node->drain_->Open([grpc = node->grpc_.get()](bool serving) { grpc->SetServing(serving); });
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
       {"policy", node->policy_->name()},
       {"max_context", node->model_->max_context()},
       {"max_sequences", config.max_sequences()},
       {"weight_bytes", node->model_->weight_bytes()},
       {"workspace_bytes", node->model_->workspace_bytes()},
       {"hbm_bytes", config.hbm_bytes()},
       {"dram_bytes", config.dram_bytes()},
       {"ready_after_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  return node;
}

absl::Status DecodeNode::StartAdminHttp() {
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

absl::Status DecodeNode::LoadModelAndMemory() {
  SLUICE_ASSIGN_OR_RETURN(device_, NewDevice(config_));
  // A step holds one row for every sequence and, beside them, a chunk of pending prompts.
  const auto sequences = static_cast<int>(config_.max_sequences());
  SLUICE_ASSIGN_OR_RETURN(
      model_, LoadModel(config_, sequences + static_cast<int>(config_.chunk_tokens()), sequences,
                        device_.get()));
  SLUICE_ASSIGN_OR_RETURN(token_bytes_, LoadTokenBytes(config_));
  SLUICE_ASSIGN_OR_RETURN(NodeMemory memory, NewNodeMemory(config_, *model_, device_.get()));
  hbm_ = std::move(memory.hbm);
  dram_ = std::move(memory.dram);
  policy_ = std::move(memory.policy);
  return absl::OkStatus();
}

absl::Status DecodeNode::StartEngine() {
  TransferTable::Options table;
  table.model_fingerprint = model_->fingerprint();
  table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  table.max_context = static_cast<uint32_t>(model_->max_context());
  table.max_lease = absl::Seconds(config_.lease_seconds());
  table.max_chunk_bytes = config_.max_chunk_bytes();
  table.footprint = [policy = policy_.get()](int64_t context, int64_t total) {
    return policy->FootprintOf(context, total);
  };
  table.hint_tokens = policy_->hint_tokens();
  table.quotas = &quotas_;
  table.retry_after = [this] { return finish_rate_.RetryAfter(); };
  transfers_ =
      std::make_unique<TransferTable>(std::move(table), dram_.get(), hbm_.get(), RealClock());
  channels_ = std::make_unique<Channels>(NewChannelCredentials(security_.tls),
                                         MaxMessageBytes(config_.max_chunk_bytes(), *policy_));
  absl::StatusOr<AddressList> sources = AddressList::Parse(config_.pull_from());
  if (!sources.ok()) return WithMessagePrefix(sources.status(), "pull_from");
  Puller::Options pull;
  pull.metrics = &metrics_;
  pull.model_fingerprint = model_->fingerprint();
  pull.layout = model_->cache_layout();
  pull.max_context = static_cast<uint32_t>(model_->max_context());
  pull.max_tokens =
      static_cast<uint32_t>(std::clamp<int64_t>(policy_->max_tokens(), 0, model_->max_context()));
  pull.max_chunk_bytes = config_.max_chunk_bytes();
  pull.streams = static_cast<int>(config_.pull_streams());
  pull.idle_timeout = absl::Seconds(config_.pull_idle_seconds());
  pull.sources = *std::move(sources);
  pull.transfers = transfers_.get();
  pull.channels = channels_.get();
  puller_ = std::make_unique<Puller>(std::move(pull));
  Engine::Options options;
  options.max_sequences = config_.max_sequences();
  options.max_waiting = config_.max_waiting();
  options.max_context = static_cast<uint32_t>(model_->max_context());
  options.chunk_tokens = config_.chunk_tokens();
  options.local_prefill = config_.local_prefill() == "always"       ? LocalPrefill::kAlways
                          : config_.local_prefill() == "on_failure" ? LocalPrefill::kOnFailure
                                                                    : LocalPrefill::kNever;
  options.seed = SeedOf(config_);
  options.transfer_wait = absl::Seconds(config_.transfer_wait_seconds());
  options.slow_reader_timeout = absl::Seconds(config_.slow_reader_timeout_seconds());
  Engine::Parts parts;
  parts.device = device_.get();
  parts.model = model_.get();
  parts.policy = policy_.get();
  parts.transfers = transfers_.get();
  parts.token_bytes = token_bytes_.has_value() ? &*token_bytes_ : nullptr;
  parts.metrics = &metrics_;
  parts.clock = RealClock();
  parts.readiness = &readiness_;
  parts.finish_rate = &finish_rate_;
  if (config_.trace_steps() > 0) {
    recorder_ = std::make_unique<StepRecorder>(config_.trace_steps());
    parts.trace = recorder_.get();
  }
  SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(options, parts));
  engine_thread_ = std::make_unique<EngineThread>(engine_.get());
  DrainControl::Options drain;
  drain.timeout = absl::Seconds(config_.drain_timeout_seconds());
  drain.engine = engine_.get();
  drain.readiness = &readiness_;
  drain.clock = RealClock();
  drain_ = std::make_unique<DrainControl>(drain);
  metrics_.SetBuildInfo({Version(), model_->config().name, device_->name(),
                         device_->kernels().name(), policy_->name()});
  memory_ready_.store(true);
  return absl::OkStatus();
}

absl::Status DecodeNode::DecodeCanary() {
  // One token less where the context is too short for two after the prompt.
  const uint32_t tokens_wanted = model_->max_context() > 2 ? 2 : 1;
  auto stream = std::make_shared<TokenStream>(2 * tokens_wanted);
  Request request;
  request.request_id = absl::StrCat("canary-", absl::Hex(RandomU64()));
  request.prompt = {0};
  request.sampling.temperature = 0;
  request.sampling.max_tokens = tokens_wanted;
  request.sampling.ignore_eos = true;
  request.deadline = RealClock()->Now() + kCanaryTimeout;
  request.allow_local_prefill = true;
  request.sink = stream;
  absl::Status status = engine_->Submit(std::move(request)).status();
  if (SLUICE_FAILPOINT(kServerCanary)) status = absl::InternalError("failpoint server.canary");
  size_t tokens = 0;
  while (status.ok()) {
    const TokenStream::Batch batch = stream->ReadBlocking();
    tokens += batch.tokens.size();
    if (!batch.finish.has_value()) continue;
    if (batch.finish->reason == FinishInfo::Reason::kError) status = batch.finish->status;
    break;
  }
  if (status.ok() && tokens != tokens_wanted) {
    status =
        absl::InternalError(absl::StrCat(tokens_wanted, " tokens were expected, found ", tokens));
  }
  return WithMessagePrefix(status, "the canary could not be decoded");
}

absl::Status DecodeNode::StartGrpc() {
  std::vector<GrpcService> services;
  const auto vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  IngestServiceOptions ingest;
  ingest.vocab_size = vocab_size;
  ingest.transfers = transfers_.get();
  ingest.readiness = &readiness_;
  ingest.metrics = &metrics_;
  ingest.access = security_.access();
  ingest.log_prompts = config_.log_prompts();
  services.push_back(NewIngestService(ingest));
  gate_.emplace(security_.access(), security_.file.get(), transfers_.get(), &quotas_);
  GenerateOptions generate;
  generate.vocab_size = vocab_size;
  generate.max_context = static_cast<uint32_t>(model_->max_context());
  generate.cancel_after = absl::Seconds(config_.slow_reader_timeout_seconds());
  generate.generator = engine_.get();
  generate.pump = &call_pump_;
  generate.metrics = &metrics_;
  generate.puller = puller_.get();
  generate.gate = &*gate_;
  generate.log_prompts = config_.log_prompts();
  services.push_back(NewDecodeService({generate, engine_.get()}));
  FacadeOptions facade;
  SLUICE_ASSIGN_OR_RETURN(facade.info,
                          MakeNodeInfo(config_.model(), config_.served_model_name(), *model_));
  facade.info.role = NodeInfo::Role::kDecode;
  facade.info.policy = policy_->name();
  facade.info.max_running = config_.max_sequences();
  facade.info.version = Version();
  load_ = std::make_unique<DecodeLoad>(engine_.get(), hbm_.get(),
                                       metrics_.tokens(TokenKind::kOutput), RealClock());
  facade.load = [load = load_.get()](auto done) { load->Ask(std::move(done)); };
  facade.readiness = &readiness_;
  facade.generate = generate;
  services.push_back(NewGatewayService(config_.gateway(), std::move(facade)));
  AdminServiceOptions admin;
  *admin.model.mutable_model() = MakeModelInfo(*model_);
  admin.model.set_device(device_->name());
  admin.model.set_policy(policy_->name());
  admin.model.set_kernels(device_->kernels().name());
  admin.model.set_version(Version());
  admin.max_sequences = config_.max_sequences();
  admin.engine = engine_.get();
  admin.transfers = transfers_.get();
  admin.pools = {dram_.get(), hbm_.get()};
  admin.allow_failpoints = config_.allow_failpoints();
  admin.drain = drain_.get();
  admin.recorder = recorder_.get();
  services.push_back(NewAdminService(std::move(admin)));
  GrpcServer::Options options;
  options.listen = config_.listen();
  options.access_log = access_log_.get();
  options.tls = security_.tls;
  options.access = security_.access();
  options.connections = {config_.max_connections(), config_.max_connections_per_peer()};
  options.max_receive_message_bytes =
      std::max(MaxMessageBytes(config_.max_chunk_bytes(), *policy_),
               MaxPromptMessageBytes(static_cast<uint64_t>(model_->max_context())));
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(options, std::move(services));
  if (!started.ok()) return WithMessagePrefix(started.status(), "listen");
  grpc_ = *std::move(started);
  counted_.store(grpc_.get());
  return absl::OkStatus();
}

std::string DecodeNode::RenderMetrics() {
  if (memory_ready_.load()) {
    for (const PagePool* pool : {dram_.get(), hbm_.get()}) {
      double fullest = 0;  // a kind runs out by itself
      for (size_t kind = 0; kind < pool->layout().kinds.size(); ++kind) {
        const PagePool::Usage usage = pool->UsageOf(kind);
        const TierGauges gauges = metrics_.Tier(pool->name(), pool->layout().kinds[kind].name);
        gauges.capacity_bytes.Set(static_cast<double>(usage.capacity_bytes));
        gauges.reserved_bytes.Set(static_cast<double>(usage.reserved_bytes));
        gauges.used_bytes.Set(static_cast<double>(usage.used_bytes));
        const int64_t block_bytes = pool->layout().kinds[kind].block_bytes();
        gauges.capacity_blocks.Set(static_cast<double>(usage.capacity_bytes / block_bytes));
        gauges.reserved_blocks.Set(static_cast<double>(usage.reserved_bytes / block_bytes));
        gauges.used_blocks.Set(static_cast<double>(usage.used_bytes / block_bytes));
        fullest = std::max(fullest, static_cast<double>(usage.used_bytes) /
                                        static_cast<double>(usage.capacity_bytes));
      }
      if (pool == hbm_.get()) metrics_.kv_usage.Set(fullest);
    }
    const WorkerStatistics workers = policy_->Workers();
    metrics_.SetWorkers({static_cast<double>(workers.workers),
                         absl::ToDoubleSeconds(workers.busy),
                         static_cast<double>(workers.tokens),
                         {static_cast<double>(workers.failed), static_cast<double>(workers.left),
                          static_cast<double>(workers.late)}});
    const ScheduleStatistics schedules = policy_->Schedules();
    ScheduleTotals totals;
    for (size_t i = 0; i < totals.layers.size(); ++i) totals.layers[i] = schedules.layers[i];
    totals.changes = static_cast<double>(schedules.changes);
    metrics_.SetSchedules(totals);
    const PolicyStatistics recent = policy_->Recent();
    SelectionTotals selection;
    for (const PolicyStatistics::Layer& layer : recent.layers) {
      selection.layers.push_back({static_cast<double>(layer.selected),
                                  static_cast<double>(layer.missing),
                                  static_cast<double>(layer.recalled)});
      selection.rows = std::max(selection.rows, static_cast<double>(layer.steps));
      selection.link_bytes += static_cast<double>(layer.link_bytes);
    }
    if (!recent.layers.empty()) {  // latent pages of HBM are places there, and nothing else
      const CacheLayout& layout = hbm_->layout();
      selection.places = static_cast<double>(hbm_->UsageOf(0).used_bytes /
                                             layout.kinds[0].bytes_per_token / layout.layers);
    }
    metrics_.SetSelection(selection);
    metrics_.transfers_open.Set(static_cast<double>(transfers_->open_transfers()));
  }
  if (GrpcServer* const grpc = counted_.load()) grpc->UpdateMetrics(metrics_);
  process_metrics_.Update(metrics_);
  return metrics_.Render();
}

absl::Status DecodeNode::EndFailed() {
  const absl::Status health = device_->Health();
  readiness_.SetFailed(health);
  grpc_->SetServing(false);
  Log(LogLevel::kError, "ending: the device failed", {{"error", std::string(health.message())}});
  ExitWithin(kFlushTime + kEndTime);
  grpc_->Shutdown(kFlushTime);  // the engine has ended every stream, or is about to
  return health;
}

absl::Status DecodeNode::ServeUntil(Signals& signals) {
  const auto failed = [this] { return !device_->Health().ok(); };
  signals.Serving();
  signals.WaitForStop(failed);
  if (failed()) return EndFailed();
  const absl::Time start = absl::Now();
  // Shared: the engine may still hold the callback when this function has gone on.
  auto idle = std::make_shared<absl::Notification>();
  drain_->Stop([idle] {
    if (!SLUICE_FAILPOINT(kServerDrain)) idle->Notify();
  });
  const absl::Duration time = absl::Seconds(config_.drain_timeout_seconds());
  // The engine ends what is left when the time is over; that takes it a step or two.
  signals.WaitForSecond(time + kEndTime, [&] { return idle->HasBeenNotified() || failed(); });
  if (failed()) return EndFailed();
  const bool finished = idle->HasBeenNotified() && absl::Now() - start < time;
  if (!idle->HasBeenNotified()) {
    engine_->CancelAll(WithReason(
        absl::UnavailableError("the node was stopped before the sequence ended: use another one"),
        reasons::kDraining));
    // Not everything finished, and if a GPU that hangs is why, its memory cannot be given back.
    ExitWithin(kFlushTime + kEndTime);
  }
  grpc_->Shutdown(signals.Count() > 1 ? absl::Milliseconds(100) : kFlushTime);
  Log(LogLevel::kInfo, "stopped",
      {{"everything_finished", finished},
       {"elapsed_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  return absl::OkStatus();
}

}  // namespace sluice
