#include "src/bench/engine_run.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/engine/engine.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(5);  // for anything that must come
constexpr int kWarmUpTokens = 3;

// Counts, and reads at once. `on_count`, if not null, is called with the count after each token, on
// the engine's thread.
class CountingSink : public TokenSink {
 public:
  explicit CountingSink(std::function<void(int64_t)> on_count) : on_count_(std::move(on_count)) {}
  bool HasRoom(size_t) const override { return true; }
  void Emit(OutputToken) override {
    ++tokens_;
    if (on_count_ != nullptr) on_count_(tokens_);
  }
  void Finish(FinishInfo info) override {
    failed_.store(info.reason == FinishInfo::Reason::kError, std::memory_order_relaxed);
    finished_.Notify();
  }
  bool ended() const { return finished_.HasBeenNotified(); }
  void WaitForEnd() const { finished_.WaitForNotification(); }

 private:
  const std::function<void(int64_t)> on_count_;
  int64_t tokens_ = 0;
  std::atomic<bool> failed_{false};
  absl::Notification finished_;
};

class EngineRun {
 public:
  EngineRun(const EngineRunOptions& options, Model* model) : options_(options), model_(model) {}

  absl::StatusOr<std::vector<EngineWindow>> Run(int slots, Device* device, PagePool* hbm,
                                                AttentionPolicy* policy) {
    SLUICE_RETURN_IF_ERROR(Start(slots, device, hbm, policy));
    marks_->times.resize(static_cast<size_t>(options_.windows) + 1);
    // All are there before the first decodes, so that they stay equally long.
    std::vector<Request> requests(static_cast<size_t>(options_.batch));
    for (Request& request : requests) SLUICE_RETURN_IF_ERROR(HandOver(request));
    for (Request& request : requests) {
      SLUICE_RETURN_IF_ERROR(engine_->Submit(std::move(request)).status());
    }
    const absl::Time give_up = absl::Now() + kPatience;
    while (!marks_->all.WaitForNotificationWithTimeout(absl::Milliseconds(20))) {
      if (sinks_.back()->ended() && !marks_->all.HasBeenNotified()) {
        return absl::InternalError("a sequence ended before its time");
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
                         absl::ToDoubleSeconds(now.turn - last.turn) / steps});
    }
    engine_->CancelAll(absl::CancelledError("measured"));
    for (const auto& sink : sinks_) sink->WaitForEnd();
    thread_.reset();
    return windows;
  }

 private:
  absl::Status Start(int slots, Device* device, PagePool* hbm, AttentionPolicy* policy) {
    total_ = options_.context + EngineTokens(options_);
    SLUICE_CHECK(total_ <= model_->max_context());
    const CacheLayout& layout = model_->cache_layout();
    SLUICE_ASSIGN_OR_RETURN(
        Buffer memory,
        device->Allocate(
            MemoryKind::kPinned,
            static_cast<size_t>((layout.BytesFor(options_.context) + 4096) * options_.batch),
            "dram"));
    SLUICE_ASSIGN_OR_RETURN(dram_, PagePool::Create("dram", layout, std::move(memory)));
    TransferTable::Options table;
    table.model_fingerprint = model_->fingerprint();
    table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    table.max_context = static_cast<uint32_t>(model_->max_context());
    table.footprint = [policy](int64_t context, int64_t total) {
      return policy->FootprintOf(context, total);
    };
    transfers_ = std::make_unique<TransferTable>(table, dram_.get(), hbm, RealClock());
    Engine::Options options;
    options.max_sequences = static_cast<uint32_t>(slots);
    options.max_context = table.max_context;
    options.chunk_tokens = 1;
    Engine::Parts parts;
    parts.device = device;
    parts.model = model_;
    parts.policy = policy;
    parts.transfers = transfers_.get();
    parts.metrics = &metrics_;
    parts.clock = RealClock();
    SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(options, parts));
    thread_ = std::make_unique<EngineThread>(engine_.get());
    return absl::OkStatus();
  }

  // A transfer of zeros, committed, and the Generate for it.
  absl::Status HandOver(Request& request) {
    Manifest manifest;
    manifest.model_fingerprint = model_->fingerprint();
    manifest.context_length = static_cast<uint32_t>(options_.context);
    manifest.prompt_token_ids.assign(manifest.context_length, 1);
    manifest.max_new_tokens = static_cast<uint32_t>(total_ - options_.context);
    SLUICE_ASSIGN_OR_RETURN(const TransferTable::Reserved reserved, transfers_->Reserve(manifest));
    for (const CacheKind& kind : model_->cache_layout().kinds) {
      const std::vector<uint8_t> zeros(
          static_cast<size_t>(kind.bytes_per_token * kind.heads * options_.context));
      ChunkHeader header;
      header.transfer_id = reserved.transfer_id;
      header.kind = kind.name;
      header.head_end = static_cast<uint32_t>(kind.heads);
      header.token_end = manifest.context_length;
      header.crc32c = Crc32c(zeros);
      for (int layer = 0; layer < model_->cache_layout().layers; ++layer) {
        header.layer = static_cast<uint32_t>(layer);
        SLUICE_ASSIGN_OR_RETURN(const auto landing, transfers_->BeginChunk(header, zeros.size()));
        landing->Append(zeros);
        SLUICE_RETURN_IF_ERROR(landing->Finish().status());
      }
    }
    SLUICE_RETURN_IF_ERROR(
        transfers_->Commit(reserved.transfer_id, {}, /*missing=*/nullptr).status());
    request.request_id = absl::StrCat("bench-", sinks_.size());
    request.handoff.transfer_id = reserved.transfer_id;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = manifest.max_new_tokens;
    request.sampling.ignore_eos = true;
    const bool youngest = sinks_.size() + 1 == static_cast<size_t>(options_.batch);
    std::function<void(int64_t)> note;
    if (youngest) note = [this](int64_t tokens) { NoteTimes(tokens); };
    sinks_.push_back(std::make_shared<CountingSink>(std::move(note)));
    request.sink = sinks_.back();
    return absl::OkStatus();
  }

  // Of the youngest sequence: notes the engine's times where a window begins or ends.
  void NoteTimes(int64_t tokens) {
    const int64_t past = tokens - kWarmUpTokens;
    if (past < 0 || past % options_.steps != 0) return;
    const auto mark = static_cast<size_t>(past / options_.steps);
    if (mark >= marks_->times.size()) return;
    // In the next turn; shared, since that may be after this object's end.
    engine_->Snapshot([marks = marks_, mark](const EngineSnapshot& snapshot) {
      marks->times[mark] = snapshot.times;
      if (mark + 1 == marks->times.size()) marks->all.Notify();
    });
  }

  struct Marks {
    std::vector<StepTimes> times;  // engine's thread, until `all`
    absl::Notification all;
  };
  const EngineRunOptions options_;
  Model* const model_;
  int total_ = 0;  // tokens of a sequence at its end
  Metrics metrics_;
  std::shared_ptr<Marks> marks_ = std::make_shared<Marks>();
  std::vector<std::shared_ptr<CountingSink>> sinks_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
};

}  // namespace

int EngineTokens(const EngineRunOptions& options) {
  // The youngest sequence joins some steps after the oldest.
  constexpr int kSpare = 64;
  return kWarmUpTokens + (options.windows + 1) * options.steps + kSpare;
}

absl::StatusOr<std::vector<EngineWindow>> RunEngine(const EngineRunOptions& options, int slots,
                                                    Device* device, Model* model, PagePool* hbm,
                                                    AttentionPolicy* policy) {
  return EngineRun(options, model).Run(slots, device, hbm, policy);
}

}  // namespace sluice
