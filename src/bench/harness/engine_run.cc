#include "src/bench/harness/engine_run.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/random_caches.h"
#include "src/device/cpu/cpu_device.h"
#include "src/engine/engine.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"

namespace sluice::bench {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(5);  // Maximum time to wait for tokens.
constexpr uint32_t kChunkTokens = 512;  // For prompts whose last tokens a policy recomputes.
constexpr int kPeers = 14;              // Threads that hand over at once.

// Counts tokens, and has room as soon as `open` is true. `on_count`, if not null, is called with
// the count after each token, on the engine's thread.
class CountingSink : public TokenSink {
 public:
  CountingSink(const std::atomic<bool>* open, std::function<void(int64_t)> on_count)
      : open_(open), on_count_(std::move(on_count)) {}
  bool HasRoom(size_t) const override { return open_->load(std::memory_order_acquire); }
  void Emit(OutputToken) override {
    ++tokens_;
    if (on_count_ != nullptr) on_count_(tokens_);
  }
  void Finish(FinishInfo info) override {
    status_ = std::move(info.status);
    finished_.Notify();
  }
  bool ended() const { return finished_.HasBeenNotified(); }
  // REQUIRES: ended().
  const absl::Status& status() const { return status_; }
  void WaitForEnd() const { finished_.WaitForNotification(); }

 private:
  const std::atomic<bool>* const open_;
  const std::function<void(int64_t)> on_count_;
  int64_t tokens_ = 0;
  absl::Status status_;  // Owned by the engine's thread until finished_.
  absl::Notification finished_;
};

// Tells whether a count has not changed for longer than `patience`.
class StallWatch {
 public:
  explicit StallWatch(absl::Duration patience) : patience_(patience) {}
  bool Stalled(int64_t count) {
    const absl::Time now = absl::Now();
    if (count != last_) since_ = now;
    last_ = count;
    return now - since_ > patience_;
  }

 private:
  const absl::Duration patience_;
  int64_t last_ = -1;
  absl::Time since_;
};

class EngineRun {
 public:
  EngineRun(const EngineRunOptions& options, Device* device, Model* model)
      : options_(options), device_(device), model_(model) {}

  absl::StatusOr<std::vector<EngineWindow>> Run(int slots, PagePool* hbm, AttentionPolicy* policy) {
    SLUICE_RETURN_IF_ERROR(Start(slots, hbm, policy));
    marks_->times.resize(static_cast<size_t>(options_.windows) + 1);
    marks_->taken.resize(marks_->times.size());
    marks_->tokens.reserve(static_cast<size_t>(options_.windows * options_.steps) + 1);
    // All sequences are in the batch, with their caches, before the first one decodes, so that they
    // stay equally long.
    SLUICE_RETURN_IF_ERROR(HandOverAll());
    StallWatch watch(options_.patience);
    for (Admitted now = AdmittedNow(slots, policy); now.warm < slots || now.running < batch();
         now = AdmittedNow(slots, policy)) {
      if (watch.Stalled(now.running + now.warm)) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "only ", now.running, " of ", batch(), " sequences were admitted, and no other in ",
            absl::FormatDuration(options_.patience),
            ": they do not fit together; lower --max-batch or --batches"));
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    const absl::Time give_up = absl::Now() + kPatience;
    open_.store(true, std::memory_order_release);
    engine_->Wake();
    while (!marks_->all.WaitForNotificationWithTimeout(absl::Milliseconds(20))) {
      if (sinks_.back()->ended() && !marks_->all.HasBeenNotified()) {
        const absl::Status& why = sinks_.back()->status();
        return absl::InternalError(
            absl::StrCat("a sequence ended before its time: ",
                         why.ok() ? "it has all its tokens" : why.message()));
      }
      if (absl::Now() > give_up) return absl::DeadlineExceededError("no tokens came");
    }
    std::vector<EngineWindow> windows;
    for (size_t i = 1; i < marks_->times.size(); ++i) {
      const StepTimes &last = marks_->times[i - 1], &now = marks_->times[i];
      const auto steps = static_cast<double>(now.steps - last.steps);
      if (now.steps == last.steps) return absl::DeadlineExceededError("the engine does not step");
      windows.push_back({absl::ToDoubleSeconds(now.step - last.step) / steps,
                         absl::ToDoubleSeconds(now.kernels - last.kernels) / steps,
                         absl::ToDoubleSeconds(now.turn - last.turn) / steps, marks_->taken[i - 1],
                         marks_->taken[i], marks_->Gaps(i - 1, options_.steps)});
    }
    engine_->CancelAll(absl::CancelledError("measured"));
    for (const auto& sink : sinks_) sink->WaitForEnd();
    thread_.reset();
    return windows;
  }

 private:
  absl::Status Start(int slots, PagePool* hbm, AttentionPolicy* policy) {
    total_ = options_.context + EngineTokens(options_);
    SLUICE_CHECK(total_ <= model_->max_context());
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
    table.footprint = [policy](int64_t context, int64_t total) {
      return policy->FootprintOf(context, total);
    };
    transfers_ = std::make_unique<TransferTable>(table, dram, hbm, RealClock());
    Engine::Options options;
    options.max_sequences = static_cast<uint32_t>(slots);
    options.max_context = table.max_context;
    options.chunk_tokens = kChunkTokens;
    Engine::Parts parts;
    parts.device = device_;
    parts.model = model_;
    parts.policy = policy;
    parts.transfers = transfers_.get();
    parts.metrics = &metrics_;
    parts.clock = RealClock();
    parts.trace = options_.trace;
    SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(options, parts));
    thread_ = std::make_unique<EngineThread>(engine_.get());
    return absl::OkStatus();
  }

  // Hands over every sequence and submits its Generate. Several threads do so, as peers would:
  // contexts of gigabytes then arrive in seconds.
  absl::Status HandOverAll() {
    if (options_.contexts == nullptr) {
      for (const CacheKind& kind : model_->cache_layout().kinds) {
        payloads_.push_back(PayloadOf(kind));
      }
    }
    std::vector<absl::Status> done(static_cast<size_t>(options_.batch));
    std::vector<std::unique_ptr<ContextReader>> readers(
        static_cast<size_t>(std::min({kPeers, AvailableCores(), options_.batch})));
    for (auto& reader : readers) {
      SLUICE_ASSIGN_OR_RETURN(reader, ContextReader::Create(device_));
    }
    std::atomic<size_t> next{0};
    {
      std::vector<std::jthread> threads;
      for (const auto& reader : readers) {
        threads.emplace_back([&] {
          for (size_t t = next++; t < done.size(); t = next++) done[t] = Begin(t, *reader);
        });
      }
    }
    for (const absl::Status& status : done) SLUICE_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  // Waits while DRAM is full: caches that a policy does not keep there leave it once their sequence
  // is admitted.
  absl::Status Begin(size_t index, ContextReader& reader) {
    StallWatch watch(options_.patience);
    for (;;) {
      const absl::StatusOr<std::string> transfer = HandOver(index, reader);
      if (transfer.ok()) {
        absl::MutexLock lock(&submit_mutex_);
        return engine_->Submit(RequestFor(*transfer)).status();
      }
      if (!absl::IsResourceExhausted(transfer.status())) return transfer.status();
      if (watch.Stalled(landed_.load(std::memory_order_relaxed))) {
        absl::MutexLock lock(&submit_mutex_);
        return absl::ResourceExhaustedError(absl::StrCat(
            "DRAM took in ", sinks_.size(), " of ", batch(), " sequences, and no other in ",
            absl::FormatDuration(options_.patience), " (", transfer.status().message(),
            "): raise --dram-bytes, or lower --max-batch or --batches"));
      }
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  // Hands over transfer number `index`, commits it and returns its id.
  absl::StatusOr<std::string> HandOver(size_t index, ContextReader& reader) {
    const Context* const given = options_.contexts == nullptr
                                     ? nullptr
                                     : &(*options_.contexts)[index % options_.contexts->size()];
    Manifest manifest;
    manifest.model_fingerprint = model_->fingerprint();
    manifest.context_length = static_cast<uint32_t>(options_.context);
    manifest.prompt_token_ids.assign(manifest.context_length, 1);
    if (given != nullptr) {
      SLUICE_CHECK(given->tokens.size() == manifest.context_length);
      manifest.prompt_token_ids.assign(given->tokens.begin(), given->tokens.end());
    }
    manifest.max_new_tokens = static_cast<uint32_t>(total_ - options_.context);
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

  // Returns the Generate for a transfer; the one for the last transfer records the times.
  Request RequestFor(const std::string& transfer) {
    Request request;
    request.request_id = absl::StrCat("bench-", sinks_.size());
    request.handoff.transfer_id = transfer;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = static_cast<uint32_t>(total_ - options_.context);
    request.sampling.ignore_eos = true;
    const bool youngest = sinks_.size() + 1 == static_cast<size_t>(options_.batch);
    std::function<void(int64_t)> note;
    if (youngest) note = [this](int64_t tokens) { NoteTimes(tokens); };
    sinks_.push_back(std::make_shared<CountingSink>(&open_, std::move(note)));
    request.sink = sinks_.back();
    return request;
  }

  // The sequences that have a slot, and the slots whose caches are warm. The engine's thread is
  // asked, because it alone may ask the policy.
  struct Admitted {
    int running = 0, warm = 0;
  };
  Admitted AdmittedNow(int slots, AttentionPolicy* policy) {
    Admitted now;
    absl::Notification asked;
    engine_->Snapshot([&](const EngineSnapshot& snapshot) {
      now.running = static_cast<int>(snapshot.running);
      for (int slot = 0; slot < slots; ++slot) now.warm += policy->Warm(slot) ? 1 : 0;
      asked.Notify();
    });
    asked.WaitForNotification();
    return now;
  }
  int batch() const { return options_.batch; }

  // The payload of one kind, the same for every layer and sequence.
  struct Payload {
    std::vector<uint16_t> values;
    uint32_t crc32c = 0;
    absl::Span<const uint8_t> bytes() const {
      return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(uint16_t)};
    }
  };
  Payload PayloadOf(const CacheKind& kind) const {
    Payload payload;
    const auto count =
        static_cast<size_t>(kind.bytes_per_token * kind.heads * options_.context) / 2;
    payload.values =
        options_.random_context ? RandomValues(count, /*seed=*/2) : std::vector<uint16_t>(count);
    payload.crc32c = Crc32c(payload.bytes());
    return payload;
  }

  // Records the engine's times where a window begins or ends. Called for the youngest sequence.
  void NoteTimes(int64_t tokens) {
    const int64_t past = tokens - kEngineWarmUpTokens;
    if (tokens == options_.first_tokens && options_.on_first != nullptr) {
      engine_->Snapshot([on_first = options_.on_first](const EngineSnapshot&) { on_first(); });
    }
    if (past >= 0 && past <= int64_t{options_.windows} * options_.steps) {
      marks_->tokens.push_back(absl::Now());
    }
    if (past == -1 && options_.on_edge != nullptr) {
      engine_->Snapshot([on_edge = options_.on_edge](const EngineSnapshot&) { on_edge(false); });
    }
    if (past < 0 || past % options_.steps != 0) return;
    const auto mark = static_cast<size_t>(past / options_.steps);
    if (mark >= marks_->times.size()) return;
    // The callback runs in the next turn, perhaps after this object's end, so the marks are shared.
    engine_->Snapshot([marks = marks_, mark, on_edge = options_.on_edge,
                       on_mark = options_.on_mark](const EngineSnapshot& snapshot) {
      marks->times[mark] = snapshot.times;
      marks->taken[mark] = absl::Now();
      if (on_mark != nullptr) on_mark(mark);
      if (mark + 1 < marks->times.size()) return;
      if (on_edge != nullptr) on_edge(true);
      marks->all.Notify();
    });
  }

  struct Marks {
    std::vector<StepTimes> times;  // Owned by the engine's thread until `all`.
    std::vector<absl::Time> taken;
    std::vector<absl::Time> tokens;  // Arrival times, from the begin of the first window on.
    absl::Notification all;
    // Returns the gaps between the tokens of a window. REQUIRES: `all`.
    std::vector<double> Gaps(size_t window, int steps) const {
      std::vector<double> gaps;
      const size_t first = window * static_cast<size_t>(steps) + 1;
      for (size_t i = first; i < first + static_cast<size_t>(steps) && i < tokens.size(); ++i) {
        gaps.push_back(absl::ToDoubleSeconds(tokens[i] - tokens[i - 1]));
      }
      return gaps;
    }
  };
  const EngineRunOptions options_;
  Device* const device_;
  Model* const model_;
  int total_ = 0;                   // Tokens of a sequence at its end.
  std::atomic<bool> open_{false};   // The readers accept tokens.
  std::atomic<int64_t> landed_{0};  // Landed chunks of all sequences.
  std::vector<Payload> payloads_;   // By kind.
  Metrics metrics_;
  std::shared_ptr<Marks> marks_ = std::make_shared<Marks>();
  // Held over RequestFor and Submit, so that sinks are in the order of submission.
  absl::Mutex submit_mutex_;
  std::vector<std::shared_ptr<CountingSink>> sinks_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
};

}  // namespace

int EngineTokens(const EngineRunOptions& options) {
  // Covers the steps in flight when the last window ends, and those until the engine is told to
  // stop.
  constexpr int kSpare = 64;
  return kEngineWarmUpTokens + (options.windows + 1) * options.steps + kSpare;
}

absl::StatusOr<std::vector<EngineWindow>> RunEngine(const EngineRunOptions& options, int slots,
                                                    Device* device, Model* model, PagePool* hbm,
                                                    AttentionPolicy* policy) {
  return EngineRun(options, device, model).Run(slots, hbm, policy);
}

}  // namespace sluice::bench
