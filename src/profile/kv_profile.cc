#include "src/profile/kv_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/clo/head_thresholds.h"
#include "src/attention/policies/recall/projection.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/scout_shares.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/topic_drift.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/model_config.h"
#include "src/profile/beta_run.h"
#include "src/profile/clo_run.h"
#include "src/profile/hash_training.h"
#include "src/profile/intervals.h"
#include "src/profile/margin_run.h"
#include "src/profile/prediction_run.h"
#include "src/profile/progress.h"
#include "src/profile/skew_run.h"
#include "src/profile/traffic.h"

namespace sluice {
namespace {

using bench::ArenaBytes;
using bench::BenchDevice;
using bench::BenchTiers;
using bench::Context;
using bench::ContextMaker;
using bench::MeasureShares;
using bench::PolicyWorld;
using bench::ShareTokens;
using bench::TopicDrift;
using bench::TopicDriftContext;
using bench::TopicDriftWeights;

class Profiler {
 public:
  explicit Profiler(const KvProfileOptions& options)
      : options_(options),
        threads_(options.threads > 0 ? static_cast<int>(options.threads) : DefaultThreads()) {}

  absl::StatusOr<PolicyProfile> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    if (options_.intervals) SLUICE_RETURN_IF_ERROR(MeasureIntervals());
    if (options_.skew) SLUICE_RETURN_IF_ERROR(MeasureSkew());
    if (options_.margins) SLUICE_RETURN_IF_ERROR(MeasureMarginsOfLayers());
    if (options_.betas) SLUICE_RETURN_IF_ERROR(MeasureThresholds());
    if (options_.clo) SLUICE_RETURN_IF_ERROR(MeasureSimilarities());
    if (options_.hash) SLUICE_RETURN_IF_ERROR(TrainHashMatrices());
    return std::move(profile_);
  }

 private:
  static constexpr int kChunkTokens = 512;  // Prompt tokens in one step.

  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(device_,
                            BenchDevice::Create({options_.device, options_.kernels, threads_}));
    Model::Options model;
    model.directory = options_.model;
    model.load_format = options_.dummy ? "dummy" : "auto";
    model.block_tokens = static_cast<int>(options_.block_tokens);
    model.max_rows = kChunkTokens + 1;
    model.max_logits = 1;
    if (options_.topic_drift) {
      model.weights = [this](const ModelConfig& of) { return TopicDriftWeights(of, Drift()); };
    }
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, &device_->device()));
    profile_.model_fingerprint = model_->fingerprint();
    SLUICE_RETURN_IF_ERROR(LoadPrompts());
    for (size_t i = 0; i < prompts_.size(); ++i) {
      const int64_t need = static_cast<int64_t>(prompts_[i].size()) +
                           ShareTokens(static_cast<int>(options_.steps)) + 1;
      if (need > model_->max_context()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "prompt ", i + 1, " has ", prompts_[i].size(), " tokens: with --steps ", options_.steps,
            " it needs a context of ", need, ", the model has ", model_->max_context(),
            ": take shorter prompts (--context), or fewer steps"));
      }
      longest_ = std::max(longest_, need);
    }
    return absl::OkStatus();
  }

  absl::Status LoadPrompts() {
    const ModelConfig& config = model_->config();
    if (!options_.traffic.empty()) {
      SLUICE_ASSIGN_OR_RETURN(prompts_, ReadTraffic(options_.traffic, config.vocab_size));
      return absl::OkStatus();
    }
    if (!options_.topic_drift) {
      prompts_ = RandomTraffic(options_.prompts, options_.context, config.vocab_size,
                               static_cast<uint64_t>(options_.seed));
      return absl::OkStatus();
    }
    SplitMix64 random(static_cast<uint64_t>(options_.seed));
    for (int64_t i = 0; i < options_.prompts; ++i) {
      prompts_.push_back(TopicDriftContext(config, Drift(), static_cast<int>(options_.context),
                                           ShareTokens(static_cast<int>(options_.steps)) + 1,
                                           random));
    }
    return absl::OkStatus();
  }

  TopicDrift Drift() const {
    TopicDrift drift;
    drift.seed = static_cast<uint64_t>(options_.seed);
    drift.max_context =
        static_cast<int>(options_.drift_context > 0 ? options_.drift_context : options_.context);
    drift.drift = options_.drift;
    drift.turning_heads = options_.turning_heads;
    drift.turning = options_.turning;
    drift.layer_change = options_.layer_change;
    return drift;
  }

  // One sequence that decodes under a policy after each prompt.
  struct Decoding {
    PolicyWorld world;
    std::unique_ptr<BenchTiers> tiers;
    std::unique_ptr<ContextMaker> maker;
  };
  absl::StatusOr<Decoding> SetUpDecoding(const PolicyOptions& policy, const std::string& name) {
    Device& device = device_->device();
    Decoding decoding;
    PolicyWorld& world = decoding.world;
    world.device = &device;
    world.model = model_.get();
    world.max_context = model_->max_context();
    world.options = policy;
    // Twice the size of its cache holds a sequence's KV slots, the arrays beside them and its
    // dense layers.
    const int64_t home = ArenaBytes(model_->cache_layout(), longest_) + (1 << 20);
    SLUICE_ASSIGN_OR_RETURN(decoding.tiers, BenchTiers::Create(device, 2 * home + (8 << 20), home));
    SLUICE_RETURN_IF_ERROR(decoding.tiers->Cut(&world, name));
    SLUICE_RETURN_IF_ERROR(SetUpPolicy(world, name).status());  // before prompts are computed
    SLUICE_ASSIGN_OR_RETURN(
        decoding.maker, ContextMaker::Create(static_cast<int>(longest_), &device, model_.get()));
    return decoding;
  }

  // Decodes each prompt. Returns a series for each layer.
  absl::StatusOr<std::vector<ShareSeries>> Decode(const PolicyOptions& policy) {
    SLUICE_ASSIGN_OR_RETURN(const Decoding decoding, SetUpDecoding(policy, "scout"));
    const PolicyWorld& world = decoding.world;
    std::vector<ShareSeries> series(static_cast<size_t>(model_->cache_layout().layers));
    Progress bar("decoding prompts");
    for (size_t i = 0; i < prompts_.size(); ++i) {
      SLUICE_ASSIGN_OR_RETURN(const Context context, decoding.maker->Compute(prompts_[i]));
      SLUICE_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> shares,
                              MeasureShares(world, context, static_cast<int>(options_.steps)));
      for (size_t step = 0; step < shares.size(); ++step) {
        for (auto layer = static_cast<size_t>(policy.dense_layers); layer < series.size();
             ++layer) {
          series[layer].Add(static_cast<int64_t>(step) + 1, shares[step][layer]);
        }
      }
      bar.Show(static_cast<int64_t>(i) + 1, static_cast<int64_t>(prompts_.size()));
    }
    return series;
  }

  absl::Status MeasureIntervals() {
    const int layers = model_->cache_layout().layers;
    PolicyOptions policy;
    policy.budget_tokens = static_cast<int>(options_.budget_tokens);
    policy.dense_layers = static_cast<int>(std::min<int64_t>(options_.dense_layers, layers));
    policy.workers = static_cast<int>(options_.workers);
    SLUICE_ASSIGN_OR_RETURN(const std::vector<ShareSeries> series, Decode(policy));
    profile_.block_tokens = static_cast<int32_t>(options_.block_tokens);
    profile_.budget_tokens = static_cast<int32_t>(options_.budget_tokens);
    profile_.share_limit = options_.share_limit;
    std::printf("CPU share of the budget, by steps since a recall\n\n");
    std::printf("%5s %9s %10s %10s %10s\n", "layer", "interval", "step 1", "at it", "last");
    double sum = 0;
    for (int layer = 0; layer < layers; ++layer) {
      PolicyProfile::Layer& of = profile_.layers.emplace_back();
      if (layer < policy.dense_layers) continue;
      of.shares = series[static_cast<size_t>(layer)].Means();
      of.interval = IntervalOf(of.shares, options_.share_limit);
      sum += of.interval;
      if (of.shares.empty()) continue;
      std::printf("%5d %9d %9.1f%% %9.1f%% %9.1f%%\n", layer, of.interval, 100 * of.shares.front(),
                  100 * of.shares[static_cast<size_t>(of.interval) - 1], 100 * of.shares.back());
    }
    const int sparse = layers - policy.dense_layers;
    if (sparse > 0) {
      std::printf("mean  %9.1f of %d steps measured\n", sum / sparse,
                  static_cast<int>(options_.steps));
    }
    return absl::OkStatus();
  }

  absl::Status MeasureSkew() {
    CapturedQueries captured;
    {
      Progress bar("queries under full attention");
      SLUICE_ASSIGN_OR_RETURN(
          captured, CaptureQueries(&device_->device(), model_.get(), prompts_, options_.skew_tokens,
                                   [&](int64_t done, int64_t all) { bar.Show(done, all); }));
    }
    SLUICE_ASSIGN_OR_RETURN(profile_.projection.columns,
                            ProjectionRank(captured.layers, captured.kv_heads, captured.head_dim,
                                           /*elements=*/0, options_.rank));
    profile_.projection.layers = static_cast<int32_t>(captured.layers);
    profile_.projection.kv_heads = static_cast<int32_t>(captured.kv_heads);
    profile_.projection.head_dim = static_cast<int32_t>(captured.head_dim);
    SkewResult skew;
    {
      Progress bar("singular values");
      skew = MakeSkew(captured, profile_.projection.columns, threads_,
                      [&](int64_t done, int64_t all) { bar.Show(done, all); });
    }
    profile_.projection.values = std::move(skew.projection);
    std::printf("\nrank correlation of partial scores (%d of %d columns) with whole ones\n\n",
                profile_.projection.columns, profile_.projection.head_dim);
    std::printf("%5s %10s %10s\n", "layer", "plain", "skewed");
    SkewQuality mean;
    for (size_t layer = 0; layer < skew.layers.size(); ++layer) {
      const SkewQuality& of = skew.layers[layer];
      std::printf("%5zu %10.3f %10.3f\n", layer, of.plain, of.skewed);
      mean.plain += of.plain / static_cast<double>(skew.layers.size());
      mean.skewed += of.skewed / static_cast<double>(skew.layers.size());
    }
    std::printf("%5s %10.3f %10.3f\n", "mean", mean.plain, mean.skewed);
    return absl::OkStatus();
  }

  absl::Status TrainHashMatrices() {
    CapturedQueries captured;
    {
      Progress bar("queries under full attention");
      SLUICE_ASSIGN_OR_RETURN(
          captured, CaptureQueries(&device_->device(), model_.get(), prompts_, options_.hash_tokens,
                                   [&](int64_t done, int64_t all) { bar.Show(done, all); }));
    }
    HashTrainingOptions training;
    training.seed = static_cast<uint64_t>(options_.seed);
    TrainedHashes trained;
    {
      Progress bar("hash matrices");
      trained = TrainHashes(captured, training, threads_,
                            [&](int64_t done, int64_t all) { bar.Show(done, all); });
    }
    profile_.hash = {static_cast<int32_t>(captured.layers), static_cast<int32_t>(captured.kv_heads),
                     static_cast<int32_t>(captured.head_dim), static_cast<int32_t>(training.bits),
                     std::move(trained.hash)};
    std::printf("\nshare of the best tenth's attention that the tenth by hash codes holds\n\n");
    std::printf("%5s %10s %10s\n", "layer", "random", "trained");
    HashQuality mean;
    for (size_t layer = 0; layer < trained.layers.size(); ++layer) {
      const HashQuality& of = trained.layers[layer];
      std::printf("%5zu %10.3f %10.3f\n", layer, of.random, of.trained);
      mean.random += of.random / static_cast<double>(trained.layers.size());
      mean.trained += of.trained / static_cast<double>(trained.layers.size());
    }
    std::printf("%5s %10.3f %10.3f\n", "mean", mean.random, mean.trained);
    return absl::OkStatus();
  }

  absl::Status MeasureMarginsOfLayers() {
    const CacheLayout& layout = model_->cache_layout();
    MarginRunOptions run;
    run.ring_tokens = options_.block_tokens;
    run.share = options_.recall_share;
    run.projection = profile_.projection.values;
    SLUICE_ASSIGN_OR_RETURN(
        run.rank,
        ProjectionRank(layout.layers, layout.kinds[0].heads, model_->config().head_dim,
                       static_cast<int64_t>(profile_.projection.values.size()), options_.rank));
    std::vector<FoundMargin> found;
    {
      Progress bar("attention by partial scores");
      SLUICE_ASSIGN_OR_RETURN(
          found, MeasureMargins(run, &device_->device(), model_.get(), prompts_,
                                [&](int64_t done, int64_t all) { bar.Show(done, all); }));
    }
    profile_.margins = {static_cast<int32_t>(run.rank), options_.recall_share, {}};
    std::printf(
        "\nmargin of recall: its selection and the newest %d tokens hold %g %% of a row's "
        "attention, for every KV head\n\n",
        static_cast<int>(run.ring_tokens), 100 * options_.recall_share);
    std::printf("%5s %9s %10s %10s\n", "layer", "margin", "selected", "held");
    double all = 0;
    for (size_t layer = 0; layer < found.size(); ++layer) {
      const FoundMargin& of = found[layer];
      profile_.margins.by_layer.push_back(of.margin);
      std::printf("%5zu %9.2f %9.1f%% %9.2f%%\n", layer, double{of.margin}, 100 * of.selected,
                  100 * of.captured);
      all += of.selected / static_cast<double>(found.size());
    }
    std::printf("%5s %9s %9.1f%%\n", "mean", "", 100 * all);
    return absl::OkStatus();
  }

  absl::Status MeasureThresholds() {
    const PolicyOptions::Hgca served;
    BetaRunOptions run;
    run.block_tokens = options_.block_tokens;
    run.window_tokens = options_.hgca_window;
    run.following = served.following;
    run.share = options_.hgca_share;
    std::vector<FoundBeta> found;
    {
      Progress bar("attention outside the window");
      SLUICE_ASSIGN_OR_RETURN(
          found, MeasureBetas(run, &device_->device(), model_.get(), prompts_,
                              [&](int64_t done, int64_t all) { bar.Show(done, all); }));
    }
    const CacheLayout& layout = model_->cache_layout();
    profile_.hgca = {options_.hgca_window, options_.hgca_share, layout.kinds[0].heads, {}};
    std::printf("\nbeta of hgca: its selection holds %g %% of the attention outside %d tokens\n\n",
                100 * options_.hgca_share, static_cast<int>(options_.hgca_window));
    std::printf("%5s %12s %12s %10s\n", "layer", "least beta", "largest", "selected");
    double all = 0;
    for (int layer = 0; layer < layout.layers; ++layer) {
      float least = INFINITY, most = 0;
      double selected = 0;
      for (int head = 0; head < layout.kinds[0].heads; ++head) {
        const FoundBeta& of = found[static_cast<size_t>(layer * layout.kinds[0].heads + head)];
        profile_.hgca.betas.push_back(of.beta);
        least = std::min(least, of.beta);
        most = std::max(most, of.beta);
        selected += of.selected / layout.kinds[0].heads;
      }
      std::printf("%5d %12.3g %12.3g %9.1f%%\n", layer, double{least}, double{most},
                  100 * selected);
      all += selected / layout.layers;
    }
    std::printf("%5s %12s %12s %9.1f%%\n", "mean", "", "", 100 * all);
    return absl::OkStatus();
  }

  absl::Status MeasureSimilarities() {
    std::vector<CloHead> found;
    {
      Progress bar("similarity of queries");
      SLUICE_ASSIGN_OR_RETURN(
          found, MeasureClo(CloRunOptions(), &device_->device(), model_.get(), prompts_,
                            [&](int64_t done, int64_t all) { bar.Show(done, all); }));
    }
    const CacheLayout& layout = model_->cache_layout();
    const int kv_heads = layout.kinds[0].heads;
    profile_.clo.kv_heads = kv_heads;
    std::printf(
        "\nheads of clo: gates, similarity of queries in neighbouring steps and with labels, and "
        "hits "
        "at %g\n\n",
        CloRunOptions().eta);
    std::printf("%5s %11s %11s %11s %11s %11s %9s\n", "layer", "least gate", "mean gate",
                "least sim.", "mean sim.", "with label", "hits");
    for (int layer = 0; layer < layout.layers; ++layer) {
      double least_gate = 1, gates = 0, least = 1, mean = 0, of_labels = 0, hits = 0;
      for (int head = 0; head < kv_heads; ++head) {
        const CloHead& of = found[static_cast<size_t>(layer * kv_heads + head)];
        for (const double outside : of.outside) {
          const double gate = GateOf(outside / static_cast<double>(of.rows));
          profile_.clo.gates.push_back(static_cast<float>(gate));
          least_gate = std::min(least_gate, gate);
          gates += gate / (kv_heads * static_cast<double>(of.outside.size()));
        }
        profile_.clo.similarities.push_back(static_cast<float>(of.MeanSimilarity()));
        profile_.clo.misses.push_back(static_cast<float>(of.MissShare()));
        profile_.clo.label_similarities.push_back(static_cast<float>(of.MeanLabelSimilarity()));
        least = std::min(least, of.MeanSimilarity());
        mean += of.MeanSimilarity() / kv_heads;
        of_labels += of.MeanLabelSimilarity() / kv_heads;
        hits += (1 - of.MissShare()) / kv_heads;
      }
      std::printf("%5d %11.3f %11.3f %11.3f %11.3f %11.3f %8.1f%%\n", layer, least_gate, gates,
                  least, mean, of_labels, 100 * hits);
    }
    SLUICE_RETURN_IF_ERROR(MeasurePredictionsOfLayers());
    if (options_.clo_batch > 0) SLUICE_RETURN_IF_ERROR(MeasurePrefetchable());
    const HeadLoads loads{
        RulesOf(profile_.clo.gates, profile_.clo.similarities, CloRunOptions().eta).difficulty,
        profile_.clo.misses, profile_.clo.predicted};
    profile_.clo.persistence_order =
        PersistenceOrder(layout.layers, kv_heads, loads, profile_.clo.prefetchable);
    if (options_.clo_batch > 0) {
      std::printf("heads that are persistent for it: %.1f %%\n",
                  100.0 * static_cast<double>(profile_.clo.persistence_order.size()) /
                      static_cast<double>(loads.misses.size()));
    }
    return absl::OkStatus();
  }

  absl::Status MeasurePredictionsOfLayers() {
    PolicyOptions sparse;
    sparse.dense_layers = 0;
    SLUICE_ASSIGN_OR_RETURN(const Decoding decoding, SetUpDecoding(sparse, "clo"));
    const int layers = model_->cache_layout().layers;
    profile_.clo.predicted.assign(static_cast<size_t>(layers), 0);
    {
      Progress bar("predicted queries");
      for (size_t i = 0; i < prompts_.size(); ++i) {
        SLUICE_ASSIGN_OR_RETURN(const Context context, decoding.maker->Compute(prompts_[i]));
        SLUICE_ASSIGN_OR_RETURN(
            const std::vector<double> cosines,
            MeasurePredictions(decoding.world, context, static_cast<int>(options_.steps)));
        for (size_t layer = 0; layer < cosines.size(); ++layer) {
          profile_.clo.predicted[layer] +=
              static_cast<float>(cosines[layer] / static_cast<double>(prompts_.size()));
        }
        bar.Show(static_cast<int64_t>(i) + 1, static_cast<int64_t>(prompts_.size()));
      }
    }
    std::printf("\ncosine of predicted queries with those of the layer, by layer\n\n");
    for (int layer = 0; layer < layers; ++layer) {
      std::printf("%5d %11.3f%s\n", layer,
                  double{profile_.clo.predicted[static_cast<size_t>(layer)]},
                  IsUnpredictable(profile_.clo.predicted, layer)
                      ? "  its heads become persistent, and select by their own queries"
                      : "");
    }
    return absl::OkStatus();
  }

  // Equation 12 of CLO. A layer takes at least the time in which what it reads of HBM is read.
  absl::Status MeasurePrefetchable() {
    SLUICE_ASSIGN_OR_RETURN(const DeviceRates rates, device_->MeasureRates(1));
    const CacheLayout& layout = model_->cache_layout();
    const auto rows = static_cast<double>(options_.clo_batch);
    const double selected =
        static_cast<double>(options_.clo_context) / static_cast<double>(options_.clo_divisor);
    const auto token_bytes = static_cast<double>(layout.kinds[0].bytes_per_token);
    const double refill = rows * selected * token_bytes;
    const double layer_bytes = static_cast<double>(model_->weight_bytes()) / layout.layers +
                               refill * layout.kinds[0].heads;
    const double seconds = layer_bytes / rates.memory.hbm;
    profile_.clo.prefetchable = PrefetchableHeads(seconds, rates.memory.to_device, refill);
    std::printf(
        "\n%lld sequences of %lld tokens: a layer reads %.1f MB of HBM in %.0f us at %.0f GB/s; a "
        "refill of a head has\n%.1f MB; the link carries %.2f of them in that time, at %.1f GB/s\n",
        static_cast<long long>(options_.clo_batch), static_cast<long long>(options_.clo_context),
        layer_bytes * 1e-6, seconds * 1e6, rates.memory.hbm * 1e-9, refill * 1e-6,
        profile_.clo.prefetchable, rates.memory.to_device * 1e-9);
    return absl::OkStatus();
  }

  const KvProfileOptions options_;
  const int threads_;
  std::unique_ptr<BenchDevice> device_;
  std::unique_ptr<Model> model_;
  std::vector<Prompt> prompts_;
  int64_t longest_ = 0;  // Tokens of the longest prompt and of what is decoded after it.
  PolicyProfile profile_;
};

}  // namespace

absl::StatusOr<PolicyProfile> ProfileKv(const KvProfileOptions& options) {
  return Profiler(options).Run();
}

}  // namespace sluice
