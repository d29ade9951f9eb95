#include "src/profile/share_run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/forwarding_policy.h"
#include "src/attention/policy_factory.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/policy_model.h"
#include "src/request/token_sink.h"

namespace sluice {
namespace {

// Reads the policy's counters between two steps of its one sequence. It waits for the device at
// each step, since it does not measure time.
class ShareWatch : public ForwardingPolicy {
 public:
  ShareWatch(AttentionPolicy* policy, Device* device, int64_t budget_tokens, int kv_heads,
             int layers)
      : ForwardingPolicy(policy),
        budget_tokens_(budget_tokens),
        kv_heads_(kv_heads),
        series_(static_cast<size_t>(layers)),
        step_done_(device->NewEvent()) {
    last_.layers.resize(series_.size());
  }

  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    step_ = 0;
    return ForwardingPolicy::Admit(slot, context, total, promise, home);
  }

  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    stream.Record(*step_done_);
    step_done_->Wait();
    PollCounters();
    ForwardingPolicy::BeginStep(stream, slots, positions);
  }

  // All steps are done, so these are the last one's counters.
  void Release(int slot) override {
    PollCounters();
    ForwardingPolicy::Release(slot);
  }

  const std::vector<ShareSeries>& series() const { return series_; }

 private:
  void PollCounters() {
    PolicyStatistics now = Statistics();
    bool decoded = false;
    for (size_t i = 0; i < series_.size(); ++i) {
      PolicyStatistics::Layer step;
      step.steps = now.layers[i].steps - last_.layers[i].steps;
      step.missing = now.layers[i].missing - last_.layers[i].missing;
      if (step.steps == 0) continue;  // Rows of the prompt, or a dense layer.
      SLUICE_CHECK(step.steps == 1, "one sequence, and no step unseen");
      decoded = true;
      series_[i].Add(step_ + 1, step.Share(budget_tokens_, kv_heads_));
    }
    if (decoded) ++step_;
    last_ = std::move(now);
  }

  const int64_t budget_tokens_;
  const int kv_heads_;
  std::vector<ShareSeries> series_;
  const std::unique_ptr<Event> step_done_;
  PolicyStatistics last_;
  int64_t step_ = 0;  // Steps decoded since the working set was made.
};

class ShareRun {
 public:
  ShareRun(const ShareRunOptions& options, Device* device, Model* model)
      : options_(options), device_(device), model_(model) {}

  absl::Status Start(int64_t longest) {
    const CacheLayout& layout = model_->cache_layout();
    // Twice the size of its cache holds a sequence's places, the arrays beside them and its dense
    // layers.
    const auto home = static_cast<size_t>(layout.BytesFor(longest) + (1 << 20));
    SLUICE_ASSIGN_OR_RETURN(hbm_, Pool("hbm", MemoryKind::kDevice, 2 * home + (8 << 20)));
    SLUICE_ASSIGN_OR_RETURN(dram_, Pool("dram", MemoryKind::kPinned, home));
    PolicyOptions policy = options_.policy;
    policy.device = device_;
    policy.hbm = hbm_.get();
    policy.dram = dram_.get();
    policy.slots = 1;
    DescribeModel(*model_, &policy);
    policy.scout.recall = false;
    policy.scout.intervals.clear();
    policy.rehearsals = 0;  // A rehearsal's share is not one of a step.
    SLUICE_ASSIGN_OR_RETURN(policy_, NewPolicy(policy));
    if (policy_->Statistics().layers.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("policy ", policy.name, " selects nothing: there is no share to measure"));
    }
    watch_ = std::make_unique<ShareWatch>(policy_.get(), device_, policy.budget_tokens,
                                          layout.kinds[0].heads, layout.layers);
    TransferTable::Options table;
    table.model_fingerprint = model_->fingerprint();
    table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    table.max_context = static_cast<uint32_t>(model_->max_context());
    table.footprint = [this](int64_t context, int64_t total) {
      return watch_->FootprintOf(context, total);
    };
    transfers_ = std::make_unique<TransferTable>(table, dram_.get(), hbm_.get(), RealClock());
    Engine::Options engine;
    engine.max_sequences = 1;
    engine.max_context = table.max_context;
    engine.chunk_tokens = static_cast<uint32_t>(model_->max_rows() - 1);
    engine.local_prefill = LocalPrefill::kAlways;
    Engine::Parts parts;
    parts.device = device_;
    parts.model = model_;
    parts.policy = watch_.get();
    parts.transfers = transfers_.get();
    parts.metrics = &metrics_;
    parts.clock = RealClock();
    SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(engine, parts));
    thread_ = std::make_unique<EngineThread>(engine_.get());
    return absl::OkStatus();
  }

  absl::Status Run(const Prompt& prompt) {
    auto stream = std::make_shared<TokenStream>(static_cast<size_t>(options_.steps + 1));
    Request request;
    request.request_id = absl::StrCat("profile-", ++prompts_);
    request.prompt = prompt;
    request.sampling.temperature = 0;
    // The prompt's last row gives the first token.
    request.sampling.max_tokens = static_cast<uint32_t>(options_.steps + 1);
    request.sampling.ignore_eos = true;
    request.allow_local_prefill = true;
    request.sink = stream;
    SLUICE_RETURN_IF_ERROR(engine_->Submit(std::move(request)).status());
    for (;;) {
      const TokenStream::Batch batch = stream->ReadBlocking();
      if (!batch.finish.has_value()) continue;
      if (batch.finish->reason == FinishInfo::Reason::kError) return batch.finish->status;
      return absl::OkStatus();
    }
  }

  // Ends the engine, so that nothing reads the series any more, and returns the series.
  std::vector<ShareSeries> Take() {
    thread_.reset();
    engine_.reset();
    return watch_->series();
  }

 private:
  absl::StatusOr<std::unique_ptr<PagePool>> Pool(const std::string& name, MemoryKind kind,
                                                 size_t bytes) {
    SLUICE_ASSIGN_OR_RETURN(Buffer memory, device_->Allocate(kind, bytes, name));
    return PagePool::Create(name, model_->cache_layout(), std::move(memory));
  }

  const ShareRunOptions options_;
  Device* const device_;
  Model* const model_;
  int64_t prompts_ = 0;
  Metrics metrics_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::unique_ptr<ShareWatch> watch_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
};

}  // namespace

absl::StatusOr<std::vector<ShareSeries>> MeasureShares(
    const ShareRunOptions& options, Device* device, Model* model,
    const std::vector<Prompt>& prompts, const std::function<void(int64_t, int64_t)>& progress) {
  int64_t longest = 0;
  for (const Prompt& prompt : prompts) {
    longest = std::max(longest, static_cast<int64_t>(prompt.size()) + options.steps + 1);
  }
  SLUICE_CHECK(longest <= model->max_context());
  ShareRun run(options, device, model);
  SLUICE_RETURN_IF_ERROR(run.Start(longest));
  for (size_t i = 0; i < prompts.size(); ++i) {
    SLUICE_RETURN_IF_ERROR(run.Run(prompts[i]));
    progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(prompts.size()));
  }
  return run.Take();
}

}  // namespace sluice
