#include "src/profile/command.h"

#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/attention/policy_profile.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/bench/report/flags.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/model_config.h"
#include "src/profile/fluxion/command.h"
#include "src/profile/kv_profile.h"
#include "src/profile/latent_profile.h"

namespace sluice {
namespace {

using bench::Flags;

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
    "Heads, for policy clo, with --clo: how much of its attention each head pays to tokens that\n"
    "are neither first nor new, and how similar its queries in neighbouring steps are. From these\n"
    "follow the thresholds of heads, and which of them lie wholly in HBM. With --hash the hash\n"
    "matrices by which clo selects are trained, too; they are written as FILE.hash: keep the two\n"
    "together. Take several prompts of a thousand tokens or more, which are like those served.\n"
    "\n"
    "Misses, for --policy ess, of a model with latent caches and an indexer: for each of\n"
    "--contexts, --ratios and --batches, sequences decode together through the real engine.\n"
    "Their misses are noted by layer, with how long a layer's stages take on that --device.\n"
    "From both the server chooses, for each layer, what overlaps its fetching; without a\n"
    "profile it chooses by the misses that it observes. With misses at two ratios or more\n"
    "below 1 it can divide places among layers (ess_divide_places): then profile from the\n"
    "fewest places that a layer may have, which --least-places must not exceed.\n"
    "\n"
    "The predictor of policy fluxion has commands of its own: sluice-profile fluxion --help.";

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

// KvProfileOptions has what both kinds of model need, too.
struct Options : KvProfileOptions {
  std::string out;
  bool no_intervals = false;
  std::string hbm_bytes = "256MiB", dram_bytes = "1GiB", ratios = "0.2";
  std::vector<int64_t> contexts, batches = {1, 4};
  int64_t least_places = 6400, transfer_workers = 4, paths = 8;
};

absl::Status Write(const PolicyProfile& profile, const std::string& path) {
  SLUICE_RETURN_IF_ERROR(WritePolicyProfile(profile, path));
  std::printf("\nwritten: %s\n", path.c_str());
  if (profile.projection.columns > 0) std::printf("written: %s\n", ProjectionPath(path).c_str());
  if (profile.hash.columns > 0) std::printf("written: %s\n", HashPath(path).c_str());
  return absl::OkStatus();
}

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
  return Write(profile, o.out);
}

absl::Status Profile(const Options& o) {
  // A model that cannot be read is reported where it is loaded.
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(o.model);
  if (!config.ok() || !config->latent.has_value()) {
    SLUICE_ASSIGN_OR_RETURN(const PolicyProfile profile, ProfileKv(o));
    return Write(profile, o.out);
  }
  if (!config->latent->indexer.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(config->architecture,
                     " has latent caches and no indexer: no policy takes a profile of it"));
  }
  if (o.skew || o.margins || o.betas || o.clo || o.hash || o.no_intervals) {
    return absl::InvalidArgumentError(absl::StrCat(o.skew      ? "--skew"
                                                   : o.margins ? "--margins"
                                                   : o.betas   ? "--betas"
                                                   : o.clo     ? "--clo"
                                                   : o.hash    ? "--hash"
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
  if (!args.empty() && args[0] == "fluxion")
    return RunFluxionCommand({args.begin() + 1, args.end()});
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
  flags.Switch("clo", "measure the heads for policy clo", &o.clo);
  flags.Integer("clo-batch",
                "with --clo: sequences that are decoded together, for the number of heads whose "
                "fetches a layer hides; 0: do not measure it",
                0, 1 << 16, &o.clo_batch);
  flags.Integer("clo-context", "tokens of these sequences", 1, int64_t{1} << 30, &o.clo_context);
  flags.Integer("clo-divisor", "clo_budget_divisor, as served", 1, 1 << 20, &o.clo_divisor);
  flags.Switch("hash", "train hash matrices for policy clo", &o.hash);
  flags.Integer("hash-tokens", "tokens that hash matrices are trained by, spread over the prompts",
                128, 1 << 20, &o.hash_tokens);
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
  flags.Number("drift", "drift of --topic-drift", 0, 1, &o.drift);
  flags.Integer("drift-context",
                "longest context for which --topic-drift makes weights; 0: --context", 0, 1 << 20,
                &o.drift_context);
  flags.Number("turning-heads", "share of the KV heads of --topic-drift with a path of their own",
               0, 1, &o.turning_heads);
  flags.Number("turning", "drift of that path", 0, 1, &o.turning);
  flags.Number("layer-change", "size of a layer's addition in --topic-drift", 0, 10,
               &o.layer_change);
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
  if (o.no_intervals && !o.skew && !o.margins && !o.betas && !o.clo && !o.hash) {
    return Fail(
        "--no-intervals leaves nothing to measure: add --skew, --margins, --betas, --clo or --hash "
        "(see "
        "--help)",
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
  o.intervals = !o.no_intervals;
  const absl::Status status = Profile(o);
  return status.ok() ? 0 : Fail(std::string(status.message()), 1);
}

}  // namespace sluice
