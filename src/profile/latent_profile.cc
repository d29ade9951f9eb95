#include "src/profile/latent_profile.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/latent_context.h"
#include "src/bench/workload/topic_drift.h"
#include "src/config/units.h"
#include "src/model/policy_model.h"
#include "src/profile/progress.h"
#include "src/profile/stage_timer.h"
#include "src/profile/traffic.h"

namespace sluice {
namespace {

using bench::Admission;
using bench::BenchDevice;
using bench::BenchTiers;
using bench::Context;
using bench::ContextMaker;
using bench::LargestBatch;
using bench::LatentDrift;
using bench::LatentDriftWeights;
using bench::LayerSpread;
using bench::LoadTwin;
using bench::MissesByLayer;
using bench::NewTwinContextMaker;
using bench::PolicyRun;
using bench::PolicyRunTokens;
using bench::PolicyWorld;
using bench::RunPolicy;
using bench::SetUpPolicy;
using bench::SpreadOfLayers;
using bench::TopicDrift;
using bench::TopicDriftContext;

constexpr int kWindows = 4;  // Windows of RunPolicy.

class LatentProfiler {
 public:
  explicit LatentProfiler(const LatentProfileOptions& options)
      : options_(options),
        steps_(std::max(1, static_cast<int>(options.steps) / kWindows)),
        most_(static_cast<int>(*std::max_element(options.batches.begin(), options.batches.end()))),
        longest_(
            static_cast<int>(*std::max_element(options.contexts.begin(), options.contexts.end()))) {
  }

  absl::StatusOr<PolicyProfile> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    std::printf("entries that a sequence misses in a step, means of the layers\n\n");
    std::printf("%9s %7s %6s %9s %9s %9s\n", "context", "ratio", "batch", "least", "mean", "most");
    for (const int64_t context : options_.contexts) {
      SLUICE_ASSIGN_OR_RETURN(const std::vector<Context> contexts,
                              Contexts(static_cast<int>(context)));
      for (const double ratio : options_.ratios) {
        for (const int64_t batch : options_.batches) {
          SLUICE_RETURN_IF_ERROR(Point(contexts, ratio, static_cast<int>(batch)));
        }
      }
    }
    SLUICE_RETURN_IF_ERROR(Rates());
    profile_.model_fingerprint = model_->fingerprint();
    return std::move(profile_);
  }

 private:
  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(
        bench_device_, BenchDevice::Create({options_.device, options_.kernels, options_.threads}));
    unrecorded_ = UnrecordedDevice(&bench_device_->device());
    load_.directory = options_.model;
    load_.load_format = options_.dummy ? "dummy" : "auto";
    load_.block_tokens = static_cast<int>(options_.block_tokens);
    load_.kv_dtype = DType::kFloat8E4M3;
    load_.max_rows = 512 + most_;
    load_.max_logits = most_;
    load_.max_context = longest_ + PolicyRunTokens(steps_);
    SLUICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options_.model));
    if (load_.max_context > config.max_position_embeddings) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a prompt of ", longest_, " tokens with --steps ", options_.steps, " needs a context of ",
          load_.max_context, ", the model has ", config.max_position_embeddings,
          ": take shorter prompts (--contexts), or fewer steps"));
    }
    if (options_.topic_drift) {
      load_.weights = [this](const ModelConfig& of) { return LatentDriftWeights(of, Drift()); };
    }
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(load_, &bench_device_->device()));
    if (!options_.traffic.empty()) {
      SLUICE_ASSIGN_OR_RETURN(traffic_, ReadTraffic(options_.traffic, model_->config().vocab_size));
    }
    timer_ = std::make_unique<StageTimer>(unrecorded_.get(), model_->cache_layout().layers);
    world_.device = unrecorded_.get();
    world_.model = model_.get();
    world_.max_context = model_->max_context();
    world_.slots = most_;
    // A sequence begins with what its prompt's last rows select: no prefill node sends hints here.
    world_.options.recompute_last = PolicyOptions::RecomputeLast::kOn;
    PolicyOptions::Ess& ess = world_.options.ess;
    ess.least_places = static_cast<int>(options_.least_places);
    ess.overlap = PolicyOptions::Ess::Overlap::kNone;
    ess.transfer_workers = static_cast<int>(options_.transfer_workers);
    ess.probe.on_stage = [this](Stream& stream, int layer, int32_t rows, EssProbe::Stage stage) {
      timer_->OnStage(stream, layer, rows, stage);
    };
    SLUICE_ASSIGN_OR_RETURN(const int64_t hbm, Bytes("--hbm-bytes", options_.hbm_bytes));
    SLUICE_ASSIGN_OR_RETURN(const int64_t dram, Bytes("--dram-bytes", options_.dram_bytes));
    SLUICE_ASSIGN_OR_RETURN(tiers_, BenchTiers::Create(bench_device_->device(), hbm, dram));
    return absl::OkStatus();
  }

  static absl::StatusOr<int64_t> Bytes(const char* flag, const std::string& text) {
    const auto bytes = ParseBytes(text);
    if (bytes.has_value() && *bytes > 0) return static_cast<int64_t>(*bytes);
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " takes a size such as 256MiB, but is '", text, "'"));
  }

  LatentDrift Drift() const {
    LatentDrift drift;
    drift.seed = static_cast<uint64_t>(options_.seed);
    drift.paths = static_cast<int>(options_.paths);
    return drift;
  }

  // Returns token ids of prompts of `tokens` tokens.
  absl::StatusOr<std::vector<Prompt>> Prompts(int tokens) const {
    const auto count = static_cast<size_t>(options_.prompts);
    if (options_.topic_drift) {
      SplitMix64 random(static_cast<uint64_t>(options_.seed));
      TopicDrift drift;
      drift.seed = static_cast<uint64_t>(options_.seed);
      drift.max_context = longest_;
      std::vector<Prompt> prompts;
      for (size_t i = 0; i < count; ++i) {
        prompts.push_back(
            TopicDriftContext(model_->config(), drift, tokens, PolicyRunTokens(steps_), random));
      }
      return prompts;
    }
    if (traffic_.empty()) {
      return RandomTraffic(options_.prompts, tokens, model_->config().vocab_size,
                           static_cast<uint64_t>(options_.seed));
    }
    std::vector<Prompt> prompts;
    for (const Prompt& prompt : traffic_) {
      if (static_cast<int>(prompt.size()) < tokens || prompts.size() == count) continue;
      prompts.emplace_back(prompt.begin(), prompt.begin() + tokens);
    }
    if (!prompts.empty()) return prompts;
    return absl::InvalidArgumentError(
        absl::StrCat("no prompt of --traffic has ", tokens,
                     " tokens: give longer ones, or a shorter one of --contexts"));
  }

  absl::StatusOr<std::vector<Context>> Contexts(int tokens) {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, Prompts(tokens));
    std::unique_ptr<Model> twin;
    std::unique_ptr<ContextMaker> maker;
    Device* const device = &bench_device_->device();
    if (options_.topic_drift) {
      SLUICE_ASSIGN_OR_RETURN(twin, LoadTwin(load_, Drift(), device));
      SLUICE_ASSIGN_OR_RETURN(maker, NewTwinContextMaker(tokens, device, twin.get()));
    } else {
      SLUICE_ASSIGN_OR_RETURN(maker, ContextMaker::Create(tokens, device, model_.get()));
    }
    std::vector<Context> out;
    Progress bar(absl::StrCat("prompts of ", tokens, " tokens"));
    for (const Prompt& prompt : prompts) {
      SLUICE_ASSIGN_OR_RETURN(out.emplace_back(), maker->Compute(prompt));
      bar.Show(static_cast<int64_t>(out.size()), static_cast<int64_t>(prompts.size()));
    }
    return out;
  }

  // Returns places in HBM per token, for a sequence that ends with `total` tokens.
  double RatioOf(int64_t total) const {
    PolicyOptions options = world_.options;
    DescribeModel(*model_, &options);
    const EssPoolShape shape =
        EssShapeOf(options, model_->cache_layout().layers,
                   model_->cache_layout().kinds[kLatentKind].block_tokens, 0);
    return std::min(1.0, static_cast<double>(shape.PlacesOf(total)) / static_cast<double>(total));
  }

  absl::Status Point(const std::vector<Context>& contexts, double ratio, int batch) {
    const auto context = static_cast<int64_t>(contexts.front().tokens.size());
    const int64_t total = context + PolicyRunTokens(steps_);
    world_.options.ess.sparse_memory_ratio = ratio;
    SLUICE_RETURN_IF_ERROR(tiers_->Cut(&world_, kPolicy));
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<AttentionPolicy> policy, SetUpPolicy(world_, kPolicy));
    const Admission room = LargestBatch(world_, *policy, context, total);
    policy.reset();
    if (room.batch < batch) {
      return absl::InvalidArgumentError(
          absl::StrCat(batch, " sequences of ", total, " tokens do not fit together, ", room.batch,
                       " do: take fewer (--batches), or more of ",
                       room.bound == "DRAM" ? "--dram-bytes" : "--hbm-bytes"));
    }
    timer_->Expect(batch);
    SLUICE_ASSIGN_OR_RETURN(const PolicyRun run,
                            RunPolicy(world_, kPolicy, contexts, batch, steps_, nullptr));
    MissProfile::Point& point = profile_.misses.points.emplace_back();
    point.context = context;
    point.ratio = RatioOf(total);
    point.batch = batch;
    point.by_layer = MissesByLayer(run.statistics);
    const LayerSpread misses = SpreadOfLayers(point.by_layer);
    std::printf("%9d %7.3f %6d %9.1f %9.1f %9.1f\n", static_cast<int>(context), point.ratio, batch,
                misses.least, misses.mean, misses.most);
    std::fflush(stdout);
    Note(point, timer_->Take());
    return absl::OkStatus();
  }

  // Notes the work of a point's stages, and how long they took.
  void Note(const MissProfile::Point& point, const std::vector<StageTimer::LayerTimes>& times) {
    const auto rows = static_cast<double>(point.batch);
    const auto context = static_cast<double>(point.context + PolicyRunTokens(steps_) / 2);
    const double selected =
        std::min(context, static_cast<double>(model_->config().latent->indexer->top_k));
    for (size_t layer = 0; layer < times.size(); ++layer) {
      const double misses = point.by_layer[layer];
      const double counts[] = {rows * context, rows, rows * misses, rows, rows * selected};
      for (size_t s = 0; s < std::size(stages_); ++s) {
        stages_[s].counts.push_back(counts[s]);
        stages_[s].times.push_back(times[layer][s]);
      }
    }
  }

  absl::Status Rates() {
    StageRates& rates = profile_.misses.rates;
    SLUICE_ASSIGN_OR_RETURN(rates.branch_us, MeasureBranch(bench_device_->device()));
    LinearTime* const fitted[] = {&rates.index, &rates.update_residency, &rates.transfer,
                                  &rates.prepare, &rates.attend};
    static constexpr const char* kNames[] = {"indexer", "residency", "transfer", "PreAttn",
                                             "attention"};
    static constexpr const char* kOf[] = {"key", "row", "entry", "row", "entry"};
    if (stages_[0].times.empty()) return absl::InternalError("no step was timed");
    std::printf("\na layer's stages on %s\n\n", bench_device_->device().name().c_str());
    for (size_t s = 0; s < std::size(stages_); ++s) {
      *fitted[s] = FitLine(stages_[s].counts, stages_[s].times);
      std::printf("%9s %9.1f us and %.3g us for each %s\n", kNames[s], fitted[s]->fixed_us,
                  fitted[s]->each_us, kOf[s]);
    }
    const auto entry =
        static_cast<double>(model_->cache_layout().kinds[kLatentKind].bytes_per_token);
    if (rates.transfer.each_us > 0) {
      std::printf("%9s %9.1f GB/s\n", "", entry / rates.transfer.each_us / 1e3);
    }
    std::printf("%9s %9.1f us\n", "a branch", rates.branch_us);
    rates.device = bench_device_->device().name();
    return absl::OkStatus();
  }

  static constexpr char kPolicy[] = "ess";
  const LatentProfileOptions options_;
  const int steps_;  // Steps of a window.
  const int most_, longest_;
  std::unique_ptr<BenchDevice> bench_device_;
  std::unique_ptr<Device> unrecorded_;
  Model::Options load_;
  std::unique_ptr<Model> model_;
  std::vector<Prompt> traffic_;
  std::unique_ptr<BenchTiers> tiers_;
  std::unique_ptr<StageTimer> timer_;
  PolicyWorld world_;
  struct Samples {
    std::vector<double> counts, times;
  } stages_[StageTimer::kTimes];
  PolicyProfile profile_;
};

}  // namespace

absl::StatusOr<PolicyProfile> ProfileLatents(const LatentProfileOptions& options) {
  return LatentProfiler(options).Run();
}

}  // namespace sluice
