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
#include "src/engine/rank_heads.h"
#include "src/facade/smg_service.h"
#include "src/kv/selection_hints.h"
#include "src/server/auto_policy.h"
#include "src/server/decode_metrics.h"
#include "src/server/events.h"
#include "src/server/kv_links.h"
#include "src/server/model_setup.h"
#include "src/server/plan.h"
#include "src/server/program.h"
#include "src/server/speculation.h"
#include "src/service/access/credentials.h"
#include "src/service/admin/admin_service.h"
#include "src/service/generate/decode_service.h"
#include "src/service/grpc/channels.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/links/link_peers.h"
#include "src/service/pull/puller.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

constexpr absl::Duration kCanaryTimeout = absl::Minutes(5);

// Returns the largest message that other nodes send, with a chunk of a KV cache or with hints.
uint64_t PeerMessageBytes(uint64_t max_chunk_bytes, const AttentionPolicy& policy) {
  uint64_t hints = policy.hint_tokens() > 0 ? kMaxHintMessageBytes : 0;
  hints += static_cast<uint64_t>(policy.hint_queries()) * sizeof(uint16_t);
  return std::max(MaxChunkMessageBytes(max_chunk_bytes), hints);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeNode>> DecodeNode::Start(const Config& config) {
  std::unique_ptr<DecodeNode> node(new DecodeNode(config));
  SLUICE_RETURN_IF_ERROR(node->StartUp());
  return node;
}

void DecodeNode::OnSecurity() {
  if (security_.file == nullptr) return;
  security_.file->OnTenants([this](const auto& all) { quotas_.Set(all); });
}

absl::Status DecodeNode::LoadModelAndMemory() {
  SLUICE_RETURN_IF_ERROR(CheckRanks(&config_));
  SLUICE_RETURN_IF_ERROR(CheckSpeculation(config_));
  SLUICE_RETURN_IF_ERROR(ResolveSpeculation(&config_));
  SLUICE_ASSIGN_OR_RETURN(events_, NewEventPublisher(config_, &metrics_));
  const StepRows step = StepRowsOf(config_);
  SLUICE_RETURN_IF_ERROR(LoadModel(step.rows, step.logits));
  SLUICE_ASSIGN_OR_RETURN(token_bytes_, LoadTokenBytes(config_));
  if (config_.policy() == kAutoPolicy) SLUICE_RETURN_IF_ERROR(ChooseAutoPolicy());
  SettleSpeculation(*model_, &config_);
  SLUICE_RETURN_IF_ERROR(ChooseSizes());
  if (ranks_.channel != nullptr) {
    SLUICE_RETURN_IF_ERROR(ShareSettings(*ranks_.channel, &config_));
    SLUICE_RETURN_IF_ERROR(CompareModels(*ranks_.channel, *model_));
    if (ranks_.link == nullptr) {
      SLUICE_ASSIGN_OR_RETURN(ranks_.arenas, MakeArenas(*ranks_.channel, config_));
    }
  }
  SLUICE_ASSIGN_OR_RETURN(NodeMemory memory,
                          NewNodeMemory(config_, *model_, device_.get(), ranks_.arenas.get()));
  hbm_ = std::move(memory.hbm);
  dram_ = std::move(memory.dram);
  policy_ = std::move(memory.policy);
  Log(LogLevel::kInfo, "policy ready",
      {{"policy", policy_->name()}, {"max_sequences", config_.max_sequences()}});
  if (ranks_.channel != nullptr) SLUICE_RETURN_IF_ERROR(MakeLeader());
  SLUICE_RETURN_IF_ERROR(MakeTransfers());
  return StartEngine();
}

absl::Status DecodeNode::MakeLeader() {
  SLUICE_ASSIGN_OR_RETURN(const HintPart part,
                          HintPartOf(model_->whole_config(), 0, RanksOf(config_)));
  SLUICE_RETURN_IF_ERROR(AwaitRanks(*ranks_.channel));
  const int slots = static_cast<int>(config_.max_sequences());
  RankDivision division;
  division.part = part;
  if (ranks_.rows != nullptr) {
    SLUICE_RETURN_IF_ERROR(MakeOthers());
    division.rows = ranks_.rows.get();
    division.ledger = ledger_.get();
    for (const NodeMemory& other : others_) division.others.push_back(other.policy.get());
  }
  leader_ = std::make_unique<RankLeader>(policy_.get(), ranks_.channel.get(), ranks_.group.get(),
                                         slots, std::move(division));
  collector_ = std::make_unique<TotalsCollector>(ranks_.channel.get());
  return absl::OkStatus();
}

absl::Status DecodeNode::MakeOthers() {
  planning_ = NewPlanningDevice(device_.get());
  for (int rank = 1; rank < RanksOf(config_); ++rank) {
    SLUICE_ASSIGN_OR_RETURN(NodeMemory other, NewMemoryOfRank(config_, *model_, planning_.get(),
                                                              ranks_.arenas.get(), rank));
    others_.push_back(std::move(other));
  }
  ledger_ = std::make_unique<RankLedger>(hbm_.get(), RanksOf(config_));
  return absl::OkStatus();
}

std::vector<const PagePool*> DecodeNode::HbmPools() const {
  std::vector<const PagePool*> pools = {hbm_.get()};
  for (const NodeMemory& other : others_) pools.push_back(other.hbm.get());
  return pools;
}

std::vector<const PagePool*> DecodeNode::DramPools() const {
  std::vector<const PagePool*> pools = {dram_.get()};
  for (const NodeMemory& other : others_) pools.push_back(other.dram.get());
  return pools;
}

absl::Status DecodeNode::ChooseAutoPolicy() {
  SLUICE_ASSIGN_OR_RETURN(const MemoryFound found, FindMemory(config_, *device_));
  SLUICE_ASSIGN_OR_RETURN(ResolvedPolicy resolved,
                          ResolvePolicy(config_, *model_, found, device_.get()));
  const AutoChoice& choice = resolved.choice;
  for (size_t i = 0; i < resolved.candidates.size(); ++i) {
    const AutoCandidate& candidate = resolved.candidates[i];
    Log(LogLevel::kInfo, "policy considered",
        {{"policy", candidate.of.policy},
         {"budget_tokens", candidate.of.budget_tokens},
         {"running", candidate.running},
         {"exact_tokens", std::min<int64_t>(candidate.exact_tokens, model_->max_context())},
         {"forecast_tokens_per_second", choice.verdicts[i].tokens_per_second},
         {"bound", choice.verdicts[i].bound},
         {"why", choice.verdicts[i].reason}});
  }
  const PolicyAndBudget& taken = resolved.candidates[choice.taken].of;
  Log(LogLevel::kInfo, "policy chosen",
      {{"policy", taken.policy},
       {"budget_tokens", taken.budget_tokens},
       {"quality", config_.quality()},
       {"max_sequences", config_.max_sequences()},
       {"max_context", model_->max_context()},
       {"why", choice.why}});
  config_ = std::move(resolved.config);
  return absl::OkStatus();
}

absl::Status DecodeNode::ChooseSizes() {
  SLUICE_ASSIGN_OR_RETURN(const MemoryFound found, FindMemory(config_, *device_));
  SLUICE_ASSIGN_OR_RETURN(const DecodeCacheSizes sizes,
                          ChooseDecodeSizes(config_, *model_, found, device_.get()));
  SLUICE_RETURN_IF_ERROR(
      CheckCacheSizes(found, sizes.beside_bytes, sizes.hbm.bytes, sizes.dram.bytes));
  SetSize("hbm_bytes", sizes.hbm.bytes, sizes.hbm.why, &Config::set_hbm_bytes);
  SetSize("dram_bytes", sizes.dram.bytes, sizes.dram.why, &Config::set_dram_bytes);
  return absl::OkStatus();
}

absl::Status DecodeNode::MakeTransfers() {
  TransferTable::Options table;
  table.model_fingerprint = model_->fingerprint();
  table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  table.max_context = static_cast<uint32_t>(model_->max_context());
  table.max_lease = absl::Seconds(config_.lease_seconds());
  table.max_chunk_bytes = config_.max_chunk_bytes();
  table.footprint = [policy = policy_.get()](int64_t context, int64_t total) {
    return policy->FootprintOf(context, total);
  };
  table.prefix_cache = config_.prefix_cache();
  table.last_rows = [policy = policy_.get()](int64_t total) {
    return policy->last_rows_wanted(total);
  };
  table.hint_tokens = ServedPolicy().hint_tokens();
  table.hint_queries = ServedPolicy().hint_queries();
  table.ledger = ledger_.get();
  for (const NodeMemory& other : others_) table.other_ranks.push_back(other.dram.get());
  if (leader_ != nullptr) {
    FarHeads* const far = ranks_.link == nullptr ? nullptr : ranks_.link->far();
    if (ranks_.rows == nullptr) {
      SLUICE_ASSIGN_OR_RETURN(HeadPlaces places,
                              HeadPlacesOf(model_->whole_config(), dram_->layout(),
                                           ranks_.arenas.get(), far, RanksOf(config_)));
      table.places.push_back(std::move(places));
    } else if (far != nullptr) {
      for (int rank = 0; rank < RanksOf(config_); ++rank) {
        table.places.push_back(PlacesOnRank(dram_->layout(), far, rank));
      }
    }
    table.await_free_pages = [leader = leader_.get()] { return leader->AwaitFreePages(); };
  }
  table.quotas = &quotas_;
  table.retry_after = [this] { return finish_rate_.RetryAfter(); };
  transfers_ =
      std::make_unique<TransferTable>(std::move(table), dram_.get(), hbm_.get(), RealClock());
  if (events_ != nullptr) {
    std::vector<PrefixCache*> caches;
    for (const auto& prefixes : transfers_->all_prefixes()) caches.push_back(prefixes.get());
    events_->Follow(std::move(caches), model_->fingerprint());
  }
  channels_ =
      std::make_unique<Channels>(NewChannelCredentials(security_.tls),
                                 PeerMessageBytes(config_.max_chunk_bytes(), ServedPolicy()));
  absl::StatusOr<AddressList> sources = AddressList::Parse(config_.pull_from());
  if (!sources.ok()) return WithMessagePrefix(sources.status(), "pull_from");
  Puller::Options pull;
  pull.metrics = &metrics_;
  pull.model_fingerprint = model_->fingerprint();
  pull.layout = transfers_->layout();
  pull.max_context = static_cast<uint32_t>(model_->max_context());
  pull.max_tokens =
      static_cast<uint32_t>(std::clamp<int64_t>(policy_->max_tokens(), 0, model_->max_context()));
  pull.max_chunk_bytes = config_.max_chunk_bytes();
  pull.streams = static_cast<int>(config_.pull_streams());
  pull.idle_timeout = absl::Seconds(config_.pull_idle_seconds());
  pull.sources = *std::move(sources);
  pull.transfers = transfers_.get();
  pull.channels = channels_.get();
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<PeerLinks> links,
                          NewKvLinks(config_, device_.get()));
  if (links != nullptr) {
    if (ranks_.arenas != nullptr) SLUICE_RETURN_IF_ERROR(PinOtherArenas());
    LinkServer::Options pushes;
    pushes.links = links;
    pushes.deadline = absl::Seconds(config_.kv_transport_deadline_seconds());
    push_links_ = std::make_unique<LinkServer>(std::move(pushes));
    LinkReader::Options read;
    read.peers.links = links;
    read.peers.deadline = absl::Seconds(config_.kv_transport_deadline_seconds());
    read.message_bytes = LinkMessageBytes(config_.max_chunk_bytes(), *links);
    pull_links_ = std::make_unique<LinkReader>(std::move(read));
  }
  pull.links = pull_links_.get();
  puller_ = std::make_unique<Puller>(std::move(pull));
  return absl::OkStatus();
}

absl::Status DecodeNode::PinOtherArenas() {
  for (int rank = 1; rank < RanksOf(config_); ++rank) {
    SLUICE_ASSIGN_OR_RETURN(Buffer pinned,
                            device_->Pin(ranks_.arenas->Of(rank), ranks_.arenas->bytes(),
                                         absl::StrCat("dram_bytes of rank ", rank, " for links")));
    other_arenas_.push_back(std::move(pinned));
  }
  return absl::OkStatus();
}

absl::Status DecodeNode::StartEngine() {
  Engine::Options options;
  options.max_sequences = config_.max_sequences();
  options.max_waiting = config_.max_waiting();
  options.max_context = static_cast<uint32_t>(model_->max_context());
  options.chunk_tokens = config_.chunk_tokens();
  options.local_prefill = config_.local_prefill() == "always"       ? LocalPrefill::kAlways
                          : config_.local_prefill() == "on_failure" ? LocalPrefill::kOnFailure
                                                                    : LocalPrefill::kNever;
  options.halves_from = static_cast<int>(config_.expert_overlap());
  options.seed = SeedOf(config_);
  options.transfer_wait = absl::Seconds(config_.transfer_wait_seconds());
  options.slow_reader_timeout = absl::Seconds(config_.slow_reader_timeout_seconds());
  Engine::Parts parts;
  parts.device = device_.get();
  parts.model = model_.get();
  parts.policy = leader_ != nullptr ? leader_.get() : policy_.get();
  parts.batch_log = leader_.get();
  parts.rank_rows = ranks_.rows.get();
  parts.transfers = transfers_.get();
  parts.token_bytes = token_bytes_.has_value() ? &*token_bytes_ : nullptr;
  parts.metrics = &metrics_;
  parts.clock = RealClock();
  parts.readiness = &readiness_;
  parts.finish_rate = &finish_rate_;
  drafter_ = NewDrafter(config_);
  parts.drafter = drafter_.get();
  options.draft_tokens = static_cast<uint32_t>(DraftTokensOf(config_));
  options.limit_drafts = config_.speculation_adaptive();
  if (config_.trace_steps() > 0) {
    recorder_ = std::make_unique<StepRecorder>(config_.trace_steps());
    parts.trace = recorder_.get();
  }
  SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(options, parts));
  if (ranks_.channel != nullptr) SLUICE_RETURN_IF_ERROR(AwaitRanks(*ranks_.channel));
  if (drafter_ != nullptr) {
    Log(LogLevel::kInfo, "speculation ready",
        {{"drafter", drafter_->name()}, {"draft_tokens", options.draft_tokens}});
  }
  engine_thread_ = std::make_unique<EngineThread>(engine_.get());
  DrainControl::Options drain;
  drain.timeout = absl::Seconds(config_.drain_timeout_seconds());
  drain.engine = engine_.get();
  drain.readiness = &readiness_;
  drain.clock = RealClock();
  drain_ = std::make_unique<DrainControl>(drain);
  metrics_.SetBuildInfo({Version(), model_->config().name, device_->name(),
                         device_->kernels().name(), policy_->name()});
  const auto pools = static_cast<int64_t>(1 + others_.size());
  SetCacheConfig(pools * hbm_->capacity_tokens(), pools * dram_->capacity_tokens(),
                 config_.prefix_cache());
  memory_ready_.store(true);
  return absl::OkStatus();
}

absl::Status DecodeNode::RunCanary() {
  // A context may be too short for two tokens after the prompt.
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

absl::StatusOr<std::vector<GrpcService>> DecodeNode::MakeServices() {
  std::vector<GrpcService> services;
  const auto vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  IngestServiceOptions ingest;
  ingest.vocab_size = vocab_size;
  ingest.transfers = transfers_.get();
  ingest.readiness = &readiness_;
  ingest.metrics = &metrics_;
  ingest.access = security_.access();
  ingest.links = push_links_.get();
  if (push_links_ != nullptr) {
    ingest.link_message_bytes = LinkMessageBytes(config_.max_chunk_bytes(), push_links_->links());
  }
  ingest.log_prompts = config_.log_prompts();
  if (ranks_.link != nullptr) {
    ingest.claims = ranks_.link->claims();
    ingest.rank_addresses.emplace_back();
    for (int rank = 1; rank < RanksOf(config_); ++rank) {
      ingest.rank_addresses.push_back(ranks_.link->IngestAddress(rank));
      const std::string& address = ingest.rank_addresses.back();
      Log(LogLevel::kInfo, "caches of a rank",
          {{"rank", rank}, {"taken_at", address.empty() ? config_.listen() : address}});
    }
  }
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
  load_ = std::make_unique<DecodeLoad>(engine_.get(), HbmPools(),
                                       metrics_.tokens(TokenKind::kOutput), RealClock());
  facade.load = [load = load_.get()](auto done) { load->Ask(std::move(done)); };
  facade.readiness = &readiness_;
  facade.generate = generate;
  services.push_back(NewGatewayService(config_.gateway(), std::move(facade)));
  AdminServiceOptions admin;
  *admin.model.mutable_model() = MakeModelInfo(*model_);
  admin.model.set_device(device_->name());
  admin.model.set_policy(policy_->name());
  admin.model.set_exact_tokens(static_cast<uint32_t>(policy_->exact_tokens()));
  admin.model.set_kernels(device_->kernels().name());
  admin.model.set_version(Version());
  admin.max_sequences = config_.max_sequences();
  admin.engine = engine_.get();
  admin.transfers = transfers_.get();
  admin.dram = DramPools();
  admin.hbm = HbmPools();
  admin.allow_failpoints = config_.allow_failpoints();
  admin.drain = drain_.get();
  admin.recorder = recorder_.get();
  services.push_back(NewAdminService(std::move(admin)));
  return services;
}

uint64_t DecodeNode::MaxMessageBytes() const {
  return std::max(PeerMessageBytes(config_.max_chunk_bytes(), ServedPolicy()),
                  MaxPromptMessageBytes(static_cast<uint64_t>(model_->max_context())));
}

void DecodeNode::Open() {
  drain_->Open([grpc = grpc_.get()](bool serving) { grpc->SetServing(serving); });
}

void DecodeNode::UpdateMetrics() {
  if (!memory_ready_.load()) return;
  UpdatePoolMetrics(DramPools(), metrics_);
  metrics_.kv_usage.Set(UpdatePoolMetrics(HbmPools(), metrics_));
  std::vector<PolicyTotals> totals = {TotalsOf(*policy_, *hbm_)};
  if (collector_ != nullptr) totals = collector_->Collect(totals[0]);
  SetPolicyMetrics(TotalsOfNode(totals, ranks_.rows != nullptr), metrics_);
  for (size_t rank = 0; rank < totals.size(); ++rank) {
    SetRankMetrics(static_cast<int>(rank), totals[rank], metrics_);
  }
  metrics_.ranks_alive.Set(ranks_.group == nullptr ? 1 : ranks_.group->alive());
  metrics_.transfers_open.Set(static_cast<double>(transfers_->open_transfers()));
  if (transfers_->all_prefixes().empty()) return;
  double tokens = 0, evicted = 0;
  for (const auto& prefixes : transfers_->all_prefixes()) {
    const PrefixCache::Statistics counts = prefixes->Count();
    tokens += static_cast<double>(counts.tokens);
    evicted += static_cast<double>(counts.evicted_tokens);
  }
  metrics_.prefix_tokens.Set(tokens);
  metrics_.SetPrefixEvicted(evicted);
}

absl::Status DecodeNode::ServeUntil(Signals& signals) {
  const auto failed = [this] { return !device_->Health().ok(); };
  signals.Serving();
  signals.WaitForStop(failed);
  if (failed()) return EndFailed();
  const absl::Time start = absl::Now();
  // It is shared because the engine may still hold the callback after this function has gone on.
  auto idle = std::make_shared<absl::Notification>();
  drain_->Stop([idle] {
    if (!SLUICE_FAILPOINT(kServerDrain)) idle->Notify();
  });
  const absl::Duration time = absl::Seconds(config_.drain_timeout_seconds());
  // When the time is over the engine ends the rest, which takes it a step or two.
  signals.WaitForSecond(time + kEndTime, [&] { return idle->HasBeenNotified() || failed(); });
  if (failed()) return EndFailed();
  const bool finished = idle->HasBeenNotified() && absl::Now() - start < time;
  if (!idle->HasBeenNotified()) {
    engine_->CancelAll(WithReason(
        absl::UnavailableError("the node was stopped before the sequence ended: use another one"),
        reasons::kDraining));
    // If the reason is a GPU that hangs, its memory cannot be given back.
    ExitWithin(kFlushTime + kEndTime);
  }
  if (idle->HasBeenNotified()) LeaveExpertLoad(config_, *model_);
  grpc_->Shutdown(signals.Count() > 1 ? absl::Milliseconds(100) : kFlushTime);
  Log(LogLevel::kInfo, "stopped",
      {{"everything_finished", finished},
       {"elapsed_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  return absl::OkStatus();
}

}  // namespace sluice
