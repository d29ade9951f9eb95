#include "tests/support/node.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "src/attention/policy_factory.h"
#include "src/base/crc32c.h"
#include "src/base/status_macros.h"
#include "src/engine/rank_follower.h"
#include "src/engine/rank_heads.h"
#include "src/model/policy_model.h"
#include "tests/support/device.h"
#include "tests/support/eventually.h"
#include "tests/support/or_fail.h"
#include "tests/support/ranks.h"

namespace sluice::testing {
namespace {

absl::StatusOr<std::unique_ptr<RankChannel>> JoinChannel(const RankGroupOptions& rank) {
  return JoinHostChannel(
      {rank.name + "-plans", rank.rank, rank.size, rank.join_timeout, rank.deadline});
}

absl::StatusOr<std::unique_ptr<SharedArenas>> MakeArenas(RankChannel& channel, const NodeOptions& o,
                                                         const RankGroupOptions& rank) {
  return SharedArenas::Make(channel, rank.name + "-dram", static_cast<size_t>(o.dram_bytes),
                            rank.join_timeout);
}

Model::Options ModelOptionsOf(const NodeOptions& o) {
  Model::Options model;
  model.directory = o.model_dir;
  model.load_format = o.load_format;
  model.kv_dtype = o.kv_dtype;
  model.block_tokens = o.block_tokens;
  model.max_context = o.max_context;
  model.max_logits = o.max_sequences * (1 + o.draft_tokens);
  model.max_rows = o.chunk_tokens + model.max_logits;
  model.halves = o.halves_from > 0;
  if (o.drafter != nullptr && o.drafter->on_device()) {
    model.draft_layer = Model::Options::DraftLayer::kRequired;
  }
  return model;
}

absl::StatusOr<NodeParts> MakeMemory(const NodeOptions& o, const Model& model, Device* device,
                                     const SharedArenas* arenas, int rank = 0) {
  NodeParts memory;
  PolicyOptions policy = o.policy;
  DescribeModel(model, &policy);
  policy.slots = o.max_sequences;
  policy.rows_per_sequence = std::max(policy.rows_per_sequence, 1 + o.draft_tokens);
  policy.hbm_bytes = o.hbm_bytes;
  policy.dram_bytes = o.dram_bytes;
  const TierShapes shapes = TierShapesOf(policy, model.cache_layout());
  SLUICE_ASSIGN_OR_RETURN(
      Buffer hbm, device->Allocate(MemoryKind::kDevice, static_cast<size_t>(o.hbm_bytes), "hbm"));
  SLUICE_ASSIGN_OR_RETURN(memory.hbm,
                          PagePool::Create("hbm", shapes.hbm, std::move(hbm), o.overcommit));
  const auto dram_bytes = static_cast<size_t>(o.dram_bytes);
  SLUICE_ASSIGN_OR_RETURN(
      Buffer dram, arenas != nullptr ? device->Pin(arenas->Of(rank), arenas->bytes(), "dram")
                                     : device->Allocate(MemoryKind::kPinned, dram_bytes, "dram"));
  SLUICE_ASSIGN_OR_RETURN(memory.dram, PagePool::Create("dram", shapes.dram, std::move(dram)));
  policy.device = device;
  policy.hbm = memory.hbm.get();
  policy.dram = memory.dram.get();
  SLUICE_ASSIGN_OR_RETURN(memory.policy, NewPolicy(policy));
  return memory;
}

}  // namespace

absl::Status Follow(const NodeOptions& o, const RankGroupOptions& rank) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                          TestDevice(o.kernels, o.threads, o.row_bucket));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RankChannel> channel, JoinChannel(rank));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> ranks, device->JoinRanks(rank));
  Model::Options options = ModelOptionsOf(o);
  (o.divide_experts ? options.expert_parallel : options.tensor_parallel) = rank.size;
  options.rank = rank.rank;
  options.ranks = ranks.get();
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options, device.get()));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<SharedArenas> arenas,
                          MakeArenas(*channel, o, rank));
  SLUICE_ASSIGN_OR_RETURN(const NodeParts memory,
                          MakeMemory(o, *model, device.get(), arenas.get(), rank.rank));
  memory.dram->FollowRankZero();
  SLUICE_RETURN_IF_ERROR(channel->Meet(rank.join_timeout));
  RankRows rows(ranks.get(), o.max_sequences);
  RankFollower::Options follow{o.max_sequences, model->max_context(), {}, o.halves_from};
  SLUICE_ASSIGN_OR_RETURN(follow.part, HintPartOf(model->whole_config(), rank.rank, rank.size));
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<RankFollower> follower,
      RankFollower::Create(
          follow, {device.get(), model.get(), memory.policy.get(), channel.get(), ranks.get(),
                   memory.dram.get(), o.divide_experts ? &rows : nullptr}));
  return follower->Run();
}

void OnRanks(NodeOptions options, int size, const std::function<void(Node&)>& work) {
  const RankGroupOptions group = RankOptions(size);
  std::vector<absl::Status> ends(static_cast<size_t>(size));
  std::vector<std::thread> followers;
  for (int rank = 1; rank < size; ++rank) {
    RankGroupOptions own = group;
    own.rank = rank;
    followers.emplace_back(
        [&ends, options, own] { ends[static_cast<size_t>(own.rank)] = Follow(options, own); });
  }
  {
    options.ranks = &group;
    Node node(options);
    work(node);
  }
  for (std::thread& follower : followers) follower.join();
  for (const absl::Status& end : ends) CHECK(end.ToString() == "OK");
}

Node::Node(const NodeOptions& o) {
  device_ = OrFail(TestDevice(o.kernels, o.threads, o.row_bucket));
  Model::Options model = ModelOptionsOf(o);
  if (o.ranks != nullptr) {
    channel_ = OrFail(JoinChannel(*o.ranks));
    ranks_ = OrFail(device_->JoinRanks(*o.ranks));
    (o.divide_experts ? model.expert_parallel : model.tensor_parallel) = o.ranks->size;
    model.ranks = ranks_.get();
  }
  model_ = OrFail(Model::Load(model, device_.get()));
  if (o.ranks != nullptr) arenas_ = OrFail(MakeArenas(*channel_, o, *o.ranks));
  NodeParts memory = OrFail(MakeMemory(o, *model_, device_.get(), arenas_.get()));
  hbm_ = std::move(memory.hbm);
  dram_ = std::move(memory.dram);
  policy_ = std::move(memory.policy);
  if (o.watch != nullptr) watch_ = o.watch(policy_.get());
  TransferTable::Options transfers;
  if (o.ranks != nullptr) {
    const ModelConfig& whole = model_->whole_config();
    const HintPart part = OrFail(HintPartOf(whole, 0, o.ranks->size));
    REQUIRE(channel_->Meet(o.ranks->join_timeout).ok());
    RankDivision division;
    division.part = part;
    if (o.divide_experts) {
      planning_ = NewPlanningDevice(device_.get());
      for (int rank = 1; rank < o.ranks->size; ++rank) {
        others_.push_back(OrFail(MakeMemory(o, *model_, planning_.get(), arenas_.get(), rank)));
        others_.back().dram->SetRank(rank);
        transfers.other_ranks.push_back(others_.back().dram.get());
        division.others.push_back(others_.back().policy.get());
      }
      rows_ = std::make_unique<RankRows>(ranks_.get(), o.max_sequences);
      division.rows = rows_.get();
      ledger_ = std::make_unique<RankLedger>(hbm_.get(), o.ranks->size);
      transfers.ledger = division.ledger = ledger_.get();
    }
    leader_ = std::make_unique<RankLeader>(policy_.get(), channel_.get(), ranks_.get(),
                                           o.max_sequences, std::move(division));
  }
  if (arenas_ != nullptr) {
    const ModelConfig& whole = model_->whole_config();
    if (!o.divide_experts) {
      transfers.places.push_back(
          OrFail(HeadPlacesOf(whole, dram_->layout(), arenas_.get(), nullptr, o.ranks->size)));
    }
    transfers.await_free_pages = [this] { return leader_->AwaitFreePages(); };
  }
  transfers.model_fingerprint = model_->fingerprint();
  transfers.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  transfers.max_context = static_cast<uint32_t>(model_->max_context());
  transfers.max_lease = o.max_lease;
  transfers.hint_tokens = policy_->hint_tokens();
  transfers.hint_queries = leader_ != nullptr ? leader_->hint_queries() : policy_->hint_queries();
  transfers.prefix_cache = o.prefix_cache;
  transfers.last_rows = [this](int64_t total) { return policy_->last_rows_wanted(total); };
  transfers.footprint = [this](int64_t context, int64_t total) {
    return policy_->FootprintOf(context, total);
  };
  transfers_ = std::make_unique<TransferTable>(transfers, dram_.get(), hbm_.get(), o.clock);
  const std::string tokenizer = o.model_dir + "/tokenizer.json";
  if (std::filesystem::exists(tokenizer)) token_bytes_ = OrFail(TokenBytes::Load(tokenizer));
  Engine::Options engine;
  engine.max_sequences = static_cast<uint32_t>(o.max_sequences);
  engine.max_waiting = o.max_waiting;
  engine.max_context = static_cast<uint32_t>(model_->max_context());
  engine.chunk_tokens = static_cast<uint32_t>(o.chunk_tokens);
  engine.local_prefill = o.local_prefill;
  engine.seed = 7;
  engine.halves_from = o.halves_from;
  engine.transfer_wait = o.transfer_wait;
  engine.slow_reader_timeout = o.slow_reader_timeout;
  Engine::Parts parts;
  parts.device = device_.get();
  parts.model = model_.get();
  parts.policy = leader_ != nullptr  ? leader_.get()
                 : watch_ != nullptr ? watch_.get()
                                     : policy_.get();
  parts.batch_log = leader_.get();
  parts.rank_rows = rows_.get();
  parts.transfers = transfers_.get();
  parts.token_bytes = token_bytes_.has_value() ? &*token_bytes_ : nullptr;
  parts.drafter = o.drafter;
  engine.draft_tokens = static_cast<uint32_t>(o.draft_tokens);
  parts.clock = o.clock;
  parts.metrics = &metrics_;
  engine_ = OrFail(Engine::Create(engine, parts));
  if (o.run_engine) thread_ = std::make_unique<EngineThread>(engine_.get());
}

Node::~Node() {
  thread_.reset();
  engine_.reset();
  transfers_.reset();
  leader_.reset();
  others_.clear();
  watch_.reset();
  policy_.reset();
}

Manifest Node::MakeManifest(const std::vector<int32_t>& prompt, uint32_t context_length,
                            uint32_t max_new_tokens) const {
  Manifest manifest;
  manifest.model_fingerprint = model_->fingerprint();
  manifest.cache_kinds = transfers_->layout().kinds;
  manifest.context_length = context_length;
  manifest.prompt_token_ids.assign(prompt.begin(), prompt.end());
  manifest.max_new_tokens = max_new_tokens;
  return manifest;
}

std::vector<uint8_t> Node::ChunkPayload(const std::vector<uint16_t>& k,
                                        const std::vector<uint16_t>& v, uint32_t begin,
                                        uint32_t end) const {
  const CacheKind& kind = transfers_->layout().kinds[0];
  const auto heads = static_cast<size_t>(kind.heads);
  const auto dim = static_cast<size_t>(model_->config().head_dim);
  std::vector<uint8_t> payload;
  const auto block_tokens = static_cast<uint32_t>(kind.block_tokens);
  for (uint32_t first = begin; first < end; first += block_tokens) {
    const uint32_t last = std::min(first + block_tokens, end);
    for (size_t head = 0; head < heads; ++head) {
      for (const std::vector<uint16_t>* part : {&k, &v}) {
        for (uint32_t token = first; token < last; ++token) {
          for (size_t d = 0; d < dim; ++d) {
            const uint16_t bits = (*part)[(token * heads + head) * dim + d];
            const size_t at = payload.size();
            if (kind.element_type == DType::kBFloat16) {
              payload.resize(at + 2);
              std::memcpy(&payload[at], &bits, 2);
            } else {
              const float value = BFloat16ToFloat(bits);
              payload.resize(at + 4);
              std::memcpy(&payload[at], &value, 4);
            }
          }
        }
      }
    }
  }
  return payload;
}

absl::StatusOr<uint64_t> Node::Land(const ChunkHeader& header,
                                    const std::vector<uint8_t>& payload) {
  auto landing = transfers_->BeginChunk(header, payload.size());
  if (!landing.ok()) return landing.status();
  // The bytes come in odd pieces, like the slices of a gRPC buffer.
  const absl::Span<const uint8_t> bytes(payload);
  for (size_t at = 0; at < bytes.size(); at += 1013) (*landing)->Append(bytes.subspan(at, 1013));
  return (*landing)->Finish();
}

std::string Node::Push(const std::vector<int32_t>& prompt, uint32_t context_length,
                       uint32_t max_new_tokens, const std::vector<std::vector<uint16_t>>& k,
                       const std::vector<std::vector<uint16_t>>& v,
                       std::vector<OutputToken> first_tokens) {
  const auto reserved =
      OrFail(transfers_->Reserve(MakeManifest(prompt, context_length, max_new_tokens)));
  for (uint32_t layer = 0; layer < k.size(); ++layer) {
    const std::vector<uint8_t> payload = ChunkPayload(k[layer], v[layer], 0, context_length);
    ChunkHeader header;
    header.transfer_id = reserved.transfer_id;
    header.layer = layer;
    header.kind = "kv";
    header.head_end = static_cast<uint32_t>(transfers_->layout().kinds[0].heads);
    header.token_end = context_length;
    header.crc32c = Crc32c(payload);
    OrFail(Land(header, payload));
  }
  OrFail(transfers_->Commit(reserved.transfer_id, std::move(first_tokens), nullptr));
  return reserved.transfer_id;
}

std::shared_ptr<TokenStream> Node::Start(Request request, size_t capacity) {
  if (request.request_id.empty()) request.request_id = absl::StrCat("r", next_request_++);
  auto stream = std::make_shared<TokenStream>(capacity, [this] { engine_->Wake(); });
  request.sink = stream;
  const absl::Status status = engine_->Submit(std::move(request)).status();
  INFO(std::string(status.ToString()));
  REQUIRE(status.ok());
  return stream;
}

Generated Node::Collect(TokenStream& stream) {
  Generated result;
  for (;;) {
    TokenStream::Batch batch = stream.ReadBlocking();
    for (OutputToken& token : batch.tokens) {
      result.ids.push_back(token.id);
      result.tokens.push_back(std::move(token));
    }
    if (batch.finish.has_value()) {
      result.finish = *std::move(batch.finish);
      return result;
    }
  }
}

Generated Node::Generate(Request request) {
  const std::shared_ptr<TokenStream> stream = Start(std::move(request));
  return Collect(*stream);
}

bool Node::Quiescent() {
  return Eventually(absl::Seconds(10), [&] {
    bool quiet = transfers_->open_transfers() == 0;
    std::vector<const PagePool*> pools = {hbm_.get(), dram_.get()};
    for (const NodeParts& other : others_) {
      pools.push_back(other.hbm.get());
      pools.push_back(other.dram.get());
    }
    for (const PagePool* pool : pools) {
      const PagePool::Usage usage = pool->UsageOf(0);
      quiet = quiet && usage.reserved_bytes == 0 && usage.used_bytes == 0;
    }
    for (int rank = 0; ledger_ != nullptr && rank < ledger_->ranks(); ++rank) {
      quiet = quiet && ledger_->sequences(rank) == 0;
    }
    return quiet;
  });
}

Request GreedyRequest(std::vector<int32_t> prompt, uint32_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

}  // namespace sluice::testing
