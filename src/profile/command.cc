#include "src/profile/command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "src/attention/policies/recall/projection.h"
#include "src/attention/policy_profile.h"
#include "src/base/logging.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/scout_shares.h"
#include "src/bench/report/flags.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/topic_drift.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/model_config.h"
#include "src/profile/beta_run.h"
#include "src/profile/intervals.h"
#include "src/profile/latent_profile.h"
#include "src/profile/margin_run.h"
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
using bench::Flags;
using bench::MeasureShares;
using bench::PolicyWorld;
using bench::ShareTokens;
using bench::TopicDrift;
using bench::TopicDriftContext;
using bench::TopicDriftWeights;

constexpr char kAbout[] =
    "Measures what sparse policies need to know of a model and its traffic beforehand, and\n"
    "writes it to a file that sluice-server reads (--policy-profile FILE).\n"
    "\n"
    "Recall intervals, for --policy scout: each prompt is decoded, and the share of the budget\n"
    "that the CPU has to attend to is noted for every layer and step since a recall. A layer's\n"
    "interval is the largest number of steps before that share reaches --share-limit.\n"
    "Profile with the traffic, block_tokens and budget_tokens that will be served: the server\n"
    "refuses others. Prompts must be longer than the budget, since a shorter one has no share.\n"
    "\n"
    "A projection, for --policy recall, with --skew: the prompts' queries under full\n"
    "attention give an orthogonal skew for each layer and KV head (a singular value\n"
    "decomposition). Its columns with the most weight become the partial queries and keys.\n"
    "The projection is written beside the profile, as FILE.projection: keep the two together.\n"
    "\n"
    "Margins, for --policy recall, with --margins: for each layer the least difference from a\n"
    "row's best partial score with which the tokens within it, and the newest block, hold\n"
    "--recall-share of the row's attention. With them fewer tokens are selected and fetched than\n"
    "the budget has room for. They belong to the projection of --skew, or to the plain columns.\n"
    "\n"
    "Thresholds, for --policy hgca, with --betas: for each layer and KV head the largest beta\n"
    "with which the tokens that a row selects hold --hgca-share of the attention that the 64 rows\n"
    "behind it pay to tokens outside the window. Profile with the block_tokens and the window\n"
    "that will be served.\n"
    "\n"
    "Misses, for --policy ess, of a model with latent caches and an indexer: for each of\n"
    "--contexts, --ratios and --batches, sequences decode together through the real engine.\n"
    "Their misses are noted by layer, with how long a layer's stages take on that --device.\n"
    "From both the server chooses, for each layer, what overlaps its fetching; without a\n"
    "profile it chooses by the misses that it observes. With misses at two ratios or more\n"
    "below 1 it can divide places among layers (--ess-divide-places): then profile from the\n"
    "fewest places that a layer may have, which --least-places must not exceed.";

constexpr char kExamples[] =
    "  sluice-profile --model models/m --traffic prompts.jsonl --out m.profile.json\n"
    "  sluice-profile --model models/m --traffic prompts.jsonl --skew --no-intervals --out m.json\n"
    "  sluice-profile --model models/m --traffic prompts.jsonl --skew --margins --no-intervals "
    "--out m.json\n"
    "  sluice-profile --model models/m --traffic prompts.jsonl --betas --no-intervals --out "
    "m.json\n"
    "  sluice-profile --model models/m --prompts 4 --context 4096 --steps 128 --out m.json\n"
    "  sluice-profile --model configs/models/qwen3-14b --topic-drift --device cuda --context 65536 "
    "\\\n"
    "      --dense-layers 0 --out drift.json\n"
    "  sluice-server --model models/m --policy scout --policy-profile m.profile.json\n"
    "  sluice-profile --model models/deepseek --traffic prompts.jsonl --contexts 32768 --ratios "
    "0.2 \\\n"
    "      --batches 1,32,76 --device cuda --hbm-bytes 40GiB --dram-bytes 100GiB --out d.json\n"
    "  sluice-profile --model configs/models/topic-drift-indexer-small --dummy --topic-drift "
    "--paths 4 \\\n"
    "      --contexts 1024 --ratios 0.16,0.3,0.6 --least-places 160 --batches 2 --out small.json";

struct Options {
  std::string model, out, traffic, kernels = "auto";
  bool dummy = false, skew = false, no_intervals = false;
  int64_t threads = 0, workers = 1, prompts = 4, context = 1024, seed = 1, steps = 64;
  int64_t block_tokens = 32, budget_tokens = 2048, dense_layers = 2;
  int64_t rank = 0, skew_tokens = 1024;
  double share_limit = PolicyOptions::Scout().share_limit;
  bool margins = false;
  double recall_share = 0.99;
  bool betas = false;
  int64_t hgca_window = 512;
  double hgca_share = 0.99;
  std::string device = "cpu", hbm_bytes = "256MiB", dram_bytes = "1GiB", ratios = "0.2";
  bool topic_drift = false;
  std::vector<int64_t> contexts, batches = {1, 4};
  int64_t least_places = 6400, transfer_workers = 4, paths = 8;
};

class Profiler {
 public:
  explicit Profiler(const Options& options)
      : options_(options),
        threads_(options.threads > 0 ? static_cast<int>(options.threads) : DefaultThreads()) {}

  absl::Status Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    if (!options_.no_intervals) SLUICE_RETURN_IF_ERROR(MeasureIntervals());
    if (options_.skew) SLUICE_RETURN_IF_ERROR(MeasureSkew());
    if (options_.margins) SLUICE_RETURN_IF_ERROR(MeasureMarginsOfLayers());
    if (options_.betas) SLUICE_RETURN_IF_ERROR(MeasureThresholds());
    SLUICE_RETURN_IF_ERROR(WritePolicyProfile(profile_, options_.out));
    std::printf("\nwritten: %s\n", options_.out.c_str());
    if (profile_.rank > 0) std::printf("written: %s\n", ProjectionPath(options_.out).c_str());
    return absl::OkStatus();
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
    drift.max_context = static_cast<int>(options_.context);
    return drift;
  }

  // Decodes each prompt. Returns a series for each layer.
  absl::StatusOr<std::vector<ShareSeries>> Decode(const PolicyOptions& policy) {
    Device& device = device_->device();
    PolicyWorld world;
    world.device = &device;
    world.model = model_.get();
    world.max_context = model_->max_context();
    world.options = policy;
    // Twice the size of its cache holds a sequence's KV slots, the arrays beside them and its
    // dense layers.
    const int64_t home = ArenaBytes(model_->cache_layout(), longest_) + (1 << 20);
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<BenchTiers> tiers,
                            BenchTiers::Create(device, 2 * home + (8 << 20), home));
    SLUICE_RETURN_IF_ERROR(tiers->Cut(&world, "scout"));
    SLUICE_RETURN_IF_ERROR(SetUpPolicy(world, "scout").status());  // before prompts are computed
    SLUICE_ASSIGN_OR_RETURN(
        const std::unique_ptr<ContextMaker> maker,
        ContextMaker::Create(static_cast<int>(longest_), &device, model_.get()));
    std::vector<ShareSeries> series(static_cast<size_t>(model_->cache_layout().layers));
    Progress bar("decoding prompts");
    for (size_t i = 0; i < prompts_.size(); ++i) {
      SLUICE_ASSIGN_OR_RETURN(const Context context, maker->Compute(prompts_[i]));
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
    SLUICE_ASSIGN_OR_RETURN(profile_.rank,
                            ProjectionRank(captured.layers, captured.kv_heads, captured.head_dim,
                                           /*elements=*/0, options_.rank));
    profile_.projection_layers = static_cast<int32_t>(captured.layers);
    profile_.kv_heads = static_cast<int32_t>(captured.kv_heads);
    profile_.head_dim = static_cast<int32_t>(captured.head_dim);
    SkewResult skew;
    {
      Progress bar("singular values");
      skew = MakeSkew(captured, profile_.rank, threads_,
                      [&](int64_t done, int64_t all) { bar.Show(done, all); });
    }
    profile_.projection = std::move(skew.projection);
    std::printf("\nrank correlation of partial scores (%d of %d columns) with whole ones\n\n",
                profile_.rank, profile_.head_dim);
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

  absl::Status MeasureMarginsOfLayers() {
    const CacheLayout& layout = model_->cache_layout();
    MarginRunOptions run;
    run.ring_tokens = options_.block_tokens;
    run.share = options_.recall_share;
    run.projection = profile_.projection;
    SLUICE_ASSIGN_OR_RETURN(
        run.rank, ProjectionRank(layout.layers, layout.kinds[0].heads, model_->config().head_dim,
                                 static_cast<int64_t>(profile_.projection.size()), options_.rank));
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

  const Options options_;
  const int threads_;
  std::unique_ptr<BenchDevice> device_;
  std::unique_ptr<Model> model_;
  std::vector<Prompt> prompts_;
  int64_t longest_ = 0;  // Tokens of the longest prompt and of what is decoded after it.
  PolicyProfile profile_;
};

// Profiles a model with latent caches.
absl::Status ProfileMisses(const Options& o) {
  LatentProfileOptions options;
  options.model = o.model;
  options.device = o.device;
  options.kernels = o.kernels;
  options.traffic = o.traffic;
  options.dummy = o.dummy;
  options.topic_drift = o.topic_drift;
  options.paths = o.paths;
  options.threads = o.threads > 0 ? static_cast<int>(o.threads) : DefaultThreads();
  options.prompts = o.prompts;
  options.seed = o.seed;
  options.steps = o.steps;
  options.block_tokens = o.block_tokens;
  options.least_places = o.least_places;
  options.transfer_workers = o.transfer_workers;
  options.hbm_bytes = o.hbm_bytes;
  options.dram_bytes = o.dram_bytes;
  options.contexts = o.contexts.empty() ? std::vector<int64_t>{o.context} : o.contexts;
  options.batches = o.batches;
  for (const auto part : absl::StrSplit(o.ratios, ',')) {
    double& ratio = options.ratios.emplace_back();
    if (absl::SimpleAtod(part, &ratio) && ratio > 0 && ratio <= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--ratios takes numbers above 0 and up to 1, but is '", o.ratios, "'"));
  }
  SLUICE_ASSIGN_OR_RETURN(const PolicyProfile profile, ProfileLatents(options));
  SLUICE_RETURN_IF_ERROR(WritePolicyProfile(profile, o.out));
  std::printf("\nwritten: %s\n", o.out.c_str());
  return absl::OkStatus();
}

absl::Status Profile(const Options& o) {
  // A model that cannot be read is reported where it is loaded.
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(o.model);
  if (!config.ok() || !config->latent.has_value()) return Profiler(o).Run();
  if (!config->latent->indexer.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(config->architecture,
                     " has latent caches and no indexer: no policy takes a profile of it"));
  }
  if (o.skew || o.margins || o.betas || o.no_intervals) {
    return absl::InvalidArgumentError(absl::StrCat(o.skew      ? "--skew"
                                                   : o.margins ? "--margins"
                                                   : o.betas   ? "--betas"
                                                               : "--no-intervals",
                                                   " is for models with keys and values of "
                                                   "heads, and ",
                                                   config->architecture,
                                                   " has latent caches: leave it out"));
  }
  return ProfileMisses(o);
}

int Fail(const std::string& what, int status) {
  std::fprintf(stderr, "sluice-profile: %s\n", what.c_str());
  return status;
}

}  // namespace

int RunProfileCommand(const std::vector<std::string>& args) {
  Options o;
  Flags flags("sluice-profile", kAbout, kExamples);
  flags.Text("model", "DIR", "Hugging Face directory", &o.model);
  flags.Switch("dummy", "make weights by formula: only config.json is read", &o.dummy);
  flags.Text("out", "FILE", "file that the profile is written to", &o.out);
  flags.Text(
      "traffic", "FILE",
      "prompts, one a line: token ids, or JSON with \"prompt_token_ids\"; without it, random ids",
      &o.traffic);
  flags.Integer("prompts", "random prompts", 1, 100'000, &o.prompts);
  flags.Integer("context", "tokens of a random prompt", 1, 1 << 20, &o.context);
  flags.Integer("seed", "seed of random prompts", 0, INT64_MAX, &o.seed);
  flags.Integer(
      "steps",
      "steps measured behind a recall, the longest interval; a prompt decodes twice as many", 1,
      4096, &o.steps);
  flags.Integer("block-tokens", "tokens in a cache block, as served", 16, 256, &o.block_tokens);
  flags.Integer("budget-tokens", "tokens attended to in a sparse layer, as served", 1, 1 << 20,
                &o.budget_tokens);
  flags.Integer("dense-layers", "first layers that are not sparse, as served", 0, 4096,
                &o.dense_layers);
  flags.Number("share-limit", "limit that the CPU's share of the budget must stay below", 0, 1,
               &o.share_limit);
  flags.Switch("no-intervals", "measure no recall intervals", &o.no_intervals);
  flags.Switch("betas", "measure thresholds for policy hgca", &o.betas);
  flags.Integer("hgca-window", "newest tokens in HBM under policy hgca, as served", 16, 1 << 20,
                &o.hgca_window);
  flags.Number("hgca-share", "share of the attention outside that window that is to be selected", 0,
               1, &o.hgca_share);
  flags.Switch("skew", "make a projection for policy recall", &o.skew);
  flags.Switch("margins", "measure margins for policy recall", &o.margins);
  flags.Number("recall-share", "share of a row's attention that is to be selected with --margins",
               0, 1, &o.recall_share);
  flags.Integer("rank", "columns of the projection; 0: half of head_dim", 0, 4096, &o.rank);
  flags.Integer("skew-tokens",
                "tokens whose queries the projection is made from, spread over the prompts", 64,
                1 << 20, &o.skew_tokens);
  flags.Choice("device", {"cpu", "cuda"}, "device that decodes", &o.device);
  flags.Integers("contexts", "tokens of the prompts for misses; default: --context", 1, 1 << 20,
                 &o.contexts);
  flags.Integers("batches", "sequences that decode together, for misses", 1, 4096, &o.batches);
  flags.Text("ratios", "X,X,...", "entries in HBM per token of a sequence, as served", &o.ratios);
  flags.Integer("least-places", "fewest entries of a layer in HBM, as served", 0, 1 << 20,
                &o.least_places);
  flags.Integer("transfer-workers", "multiprocessors that fetch, as served", 1, 1024,
                &o.transfer_workers);
  flags.Text("hbm-bytes", "BYTES", "HBM for sequences, for misses", &o.hbm_bytes);
  flags.Text("dram-bytes", "BYTES", "DRAM for their entries, for misses", &o.dram_bytes);
  flags.Switch(
      "topic-drift",
      "make weights and prompts by formula, whose attention moves; only config.json is read",
      &o.topic_drift);
  flags.Integer("paths", "paths of --topic-drift; each layer's indexer sees one of them", 1, 64,
                &o.paths);
  flags.Text("kernels", "NAME", "CPU kernels, as in sluice-server", &o.kernels);
  flags.Integer("threads", "threads that compute; 0: as the server chooses", 0, 1024, &o.threads);
  flags.Integer("workers", "threads that attend to blocks outside HBM", 1, 1024, &o.workers);
  const absl::StatusOr<bool> parsed = flags.Parse(args);
  if (!parsed.ok()) return Fail(absl::StrCat(parsed.status().message(), " (see --help)"), 2);
  if (!*parsed) {
    std::fputs(flags.Help().c_str(), stdout);
    return 0;
  }
  if (o.model.empty()) return Fail("--model is missing (see --help)", 2);
  if (o.out.empty()) return Fail("--out is missing: name the file to write (see --help)", 2);
  if (o.no_intervals && !o.skew && !o.margins && !o.betas) {
    return Fail(
        "--no-intervals leaves nothing to measure: add --skew, --margins or --betas (see --help)",
        2);
  }
  if (o.topic_drift && !o.traffic.empty()) {
    return Fail("--topic-drift makes its own prompts: leave --traffic out (see --help)", 2);
  }
  if (o.hgca_window % o.block_tokens != 0) {
    return Fail("--hgca-window takes a multiple of --block-tokens (see --help)", 2);
  }
  // Policies' log lines do not belong into the table.
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  const absl::Status status = Profile(o);
  return status.ok() ? 0 : Fail(std::string(status.message()), 1);
}

}  // namespace sluice
