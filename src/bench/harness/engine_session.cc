#include "src/bench/harness/engine_session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/random_caches.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice::bench {
namespace {

constexpr uint32_t kChunkTokens = 512;  // For prompts whose last tokens a policy recomputes.
constexpr int kPeers = 14;              // Threads that hand over at once.
// A sequence waits for all others, whose working sets may take seconds each.
constexpr absl::Duration kReaderPatience = absl::Minutes(5);

}  // namespace

absl::StatusOr<std::unique_ptr<EngineSession>> EngineSession::Create(
    const EngineRunOptions& options, int slots, Device* device, Model* model, PagePool* hbm,
    AttentionPolicy* policy) {
  std::unique_ptr<EngineSession> session(new EngineSession(options, slots, device, model, policy));
  SLUICE_RETURN_IF_ERROR(session->Start(hbm));
  return session;
}

absl::Status EngineSession::Start(PagePool* hbm) {
  const CacheLayout& layout = model_->cache_layout();
  PagePool* dram = options_.dram;
  if (dram == nullptr) {
    SLUICE_ASSIGN_OR_RETURN(
        Buffer memory,
        device_->Allocate(
            MemoryKind::kPinned,
            static_cast<size_t>((layout.BytesFor(options_.context) + 4096) * options_.batch),
            "dram"));
    SLUICE_ASSIGN_OR_RETURN(dram_, PagePool::Create("dram", layout, std::move(memory)));
    dram = dram_.get();
  }
  TransferTable::Options table;
  table.model_fingerprint = model_->fingerprint();
  table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
  table.max_context = static_cast<uint32_t>(model_->max_context());
  for (const CacheKind& kind : layout.kinds) {  // A chunk holds one layer.
    const int64_t bytes = kind.bytes_per_token * kind.heads * options_.context;
    table.max_chunk_bytes = std::max(table.max_chunk_bytes, static_cast<uint64_t>(bytes));
  }
  table.prefix_cache = false;  // every prompt that is measured is handed over whole
  table.footprint = [policy = policy_](int64_t context, int64_t total) {
    return policy->FootprintOf(context, total);
  };
  transfers_ = std::make_unique<TransferTable>(table, dram, hbm, RealClock());
  Engine::Options options;
  options.max_sequences = static_cast<uint32_t>(slots_);
  options.max_context = table.max_context;
  options.chunk_tokens = kChunkTokens;
  options.slow_reader_timeout = kReaderPatience;
  Engine::Parts parts;
  parts.device = device_;
  parts.model = model_;
  parts.policy = policy_;
  parts.transfers = transfers_.get();
  parts.metrics = &metrics_;
  parts.clock = RealClock();
  parts.trace = options_.trace;
  parts.drafter = options_.drafter;
  options.draft_tokens = static_cast<uint32_t>(options_.draft_tokens);
  SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(options, parts));
  thread_ = std::make_unique<EngineThread>(engine_.get());
  if (options_.contexts == nullptr) {
    for (const CacheKind& kind : layout.kinds) payloads_.push_back(PayloadOf(kind));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> EngineSession::HandOver(const Context* given, int new_tokens,
                                                    ContextReader& reader, int32_t last) {
  Manifest manifest;
  manifest.model_fingerprint = model_->fingerprint();
  manifest.context_length = static_cast<uint32_t>(
      given == nullptr ? options_.context : static_cast<int>(given->tokens.size()));
  manifest.prompt_token_ids.assign(manifest.context_length, 1);
  manifest.prompt_token_ids.back() = static_cast<uint32_t>(last);
  if (given != nullptr) {
    manifest.prompt_token_ids.assign(given->tokens.begin(), given->tokens.end());
  }
  manifest.max_new_tokens = static_cast<uint32_t>(new_tokens);
  SLUICE_ASSIGN_OR_RETURN(const TransferTable::Reserved reserved, transfers_->Reserve(manifest));
  const CacheLayout& layout = model_->cache_layout();
  for (size_t k = 0; k < layout.kinds.size(); ++k) {
    ChunkHeader header;
    header.transfer_id = reserved.transfer_id;
    header.kind = layout.kinds[k].name;
    header.head_end = static_cast<uint32_t>(layout.kinds[k].heads);
    header.token_end = manifest.context_length;
    for (int layer = 0; layer < layout.layers; ++layer) {
      header.layer = static_cast<uint32_t>(layer);
      header.crc32c = given == nullptr ? payloads_[k].crc32c : given->payload(layer, k).crc32c;
      const size_t bytes =
          given == nullptr ? payloads_[k].bytes().size() : given->payload(layer, k).bytes;
      SLUICE_ASSIGN_OR_RETURN(const auto landing, transfers_->BeginChunk(header, bytes));
      if (given == nullptr) {
        landing->Append(payloads_[k].bytes());
      } else {
        reader.Read(*given, layer, k, [&](auto piece) { landing->Append(piece); });
      }
      SLUICE_RETURN_IF_ERROR(landing->Finish().status());
      landed_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  SLUICE_RETURN_IF_ERROR(
      transfers_->Commit(reserved.transfer_id, {}, /*missing=*/nullptr).status());
  return reserved.transfer_id;
}

absl::Status EngineSession::HandOverAll(
    size_t count, const std::function<absl::Status(size_t, ContextReader&)>& hand_over) {
  std::vector<absl::Status> done(count);
  std::vector<std::unique_ptr<ContextReader>> readers(
      std::min(static_cast<size_t>(std::min(kPeers, AvailableCores())), count));
  for (auto& reader : readers) {
    SLUICE_ASSIGN_OR_RETURN(reader, ContextReader::Create(device_));
  }
  std::atomic<size_t> next{0};
  {
    std::vector<std::jthread> threads;
    for (const auto& reader : readers) {
      threads.emplace_back([&] {
        for (size_t t = next++; t < count; t = next++) done[t] = hand_over(t, *reader);
      });
    }
  }
  for (const absl::Status& status : done) SLUICE_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

EngineSession::Admitted EngineSession::AdmittedNow() {
  Admitted now;
  absl::Notification asked;
  engine_->Snapshot([&](const EngineSnapshot& snapshot) {
    now.running = static_cast<int>(snapshot.running);
    now.prompts_ended = static_cast<int>(snapshot.prompts_ended);
    for (int slot = 0; slot < slots_; ++slot) now.warm += policy_->Warm(slot) ? 1 : 0;
    asked.Notify();
  });
  asked.WaitForNotification();
  return now;
}

void EngineSession::Open() {
  engine_->Snapshot([this](const EngineSnapshot&) { open_ = true; });
}

EngineSession::Payload EngineSession::PayloadOf(const CacheKind& kind) const {
  Payload payload;
  const auto count = static_cast<size_t>(kind.bytes_per_token * kind.heads * options_.context) / 2;
  payload.values =
      options_.random_context ? RandomValues(count, /*seed=*/2) : std::vector<uint16_t>(count);
  payload.crc32c = Crc32c(payload.bytes());
  return payload;
}

}  // namespace sluice::bench
