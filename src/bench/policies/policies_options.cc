#include "src/bench/policies/policies_options.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/bench/harness/policy_choice.h"
#include "src/bench/report/flags.h"
#include "src/config/units.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Runs attention policies side by side: the same sequences, the same HBM cap, the same engine.

Columns: the largest batch that the policy admits (marked *) and the batches asked for; tokens/s; time per
output token of one sequence, p50 and p99; the share of a traced run's time in which no kernel of the model
ran (waits and what only moves K and V over the link are none); of the budget what the CPU attended to or the
link brought; of what was selected what lay in HBM; K and V over the link in a step; steps from one recall of a
layer to its next; what ends the largest batch. (HGCA's contextual copies take as much DRAM as the home.) Then
what a step must move in HBM, over the link and in DRAM; the floor that it sets at the
rates measured in this run; how close the step came; and the policy's tokens/s over those of full at its largest
batch, beside the ratio of their floors.

A policy may be given settings: recall:budget=20%, hgca:beta=0.5:window=1024, scout:interval=8. hgca-mean is
hgca with the beta for which the CPU attends, on average, to what the budget leaves beside the window.

--topic-drift takes config.json alone and makes a model and contexts whose attention is sparse and drifts;
--statistics N says first how a workload behaves over N steps: how well queries are predicted, how fast the
important blocks change, and what of policy scout's budget the CPU gets if nothing is recalled. --drift takes
several values, and everything is run for each. Of a model with an indexer (DeepSeek-V3.2) each layer sees one
of --paths paths, from --slowest to --fastest; its contexts have that model's index keys and entries of other
values.

--overlap says what transfers cost a step of policy ess and its siblings: steps that fetch and steps that do not,
in turn, with the same selections. --misses A,B,... does that with selections that miss so many entries of a
sequence in each layer and step, the indexer still at work; --only-overlap leaves out everything else.

--quality compares with policy full instead, on texts as tokens (tools/sluice texts): every step is given the
text's own tokens, and its logits are compared; pass keys that are hidden in a text are asked for.
)";
constexpr char kExamples[] =
    R"(  sluice-bench policies --model models/smollm2-135m-instruct --contexts 2048 --batches 1,4
  sluice-bench policies --model M --policies full,scout --hbm-bytes 64MiB --out policies-run
  tools/sluice texts --tokenizer models/smollm2-135m-instruct --out texts.json
  sluice-bench policies --model models/smollm2-135m-instruct --quality --texts texts.json
  sluice-bench policies --model M --quality --texts texts.json --contexts 8000 --quality-texts 8 --passkeys 0
  sluice-bench policies --model configs/models/topic-drift-small --topic-drift --statistics 16 --dense-layers 0
  sluice-bench policies --device cuda --model configs/models/qwen3-14b --topic-drift --contexts 65536 \
      --distinct 2 --hbm-bytes 21GiB --dram-bytes 110GiB --budget 2048 --dense-layers 0 --workers 14
  sluice-bench policies --model configs/models/topic-drift-indexer-small --topic-drift --paths 4 \
      --policies ess-da:ratio=0.2:least=256,ess-dba:ratio=0.2:least=256 --batches 4 --given-batches \
      --misses 0,16,64 --only-overlap
)";

// What is wrong with the flags beyond what each says itself.
std::optional<std::string> Wrong(const PoliciesBenchOptions& o) {
  if (o.model.empty()) return "--model is missing";
  if (o.topic_drift && !o.texts.empty()) return "--topic-drift and --texts exclude each other";
  if (o.statistics > 0 && !o.topic_drift) return "--statistics needs --topic-drift";
  if (o.statistics > 4 * o.steps) return "--statistics takes at most four times --steps";
  if (o.quality && o.texts.empty()) return "--quality needs --texts FILE (tools/sluice texts)";
  for (const auto& [flag, value] : {std::pair{"--hbm-bytes", o.hbm_bytes},
                                    {"--dram-bytes", o.dram_bytes},
                                    {"--forecast-dram", o.forecast_dram},
                                    {"--forecast-hbm", o.forecast_hbm}}) {
    if (absl::StartsWith(flag, "--forecast") && value.empty()) continue;
    if (!ParseBytes(value).has_value()) {
      return absl::StrCat(flag, " takes a size such as 256MiB, but is '", value, "'");
    }
  }
  if (o.latent && o.statistics > 0) return "--statistics is for models without latent caches";
  if (o.latent && o.quality) return "--quality is for models without latent caches";
  if (o.latent && o.drifts.size() > 1) return "--drift of several values: set --slowest, --fastest";
  if (!o.topic_drift && o.drifts.size() > 1) return "--drift needs --topic-drift";
  if (!o.runs && !o.overlap && o.set_misses.empty()) {
    return "--only-overlap needs --overlap or --misses";
  }
  if (!o.latent && (o.overlap || !o.set_misses.empty())) {
    return "--overlap and --misses are for models with latent caches and an indexer";
  }
  if (o.block_tokens % 16 != 0) return "--block-tokens takes a multiple of 16";
  for (const int64_t batch : o.batches) {
    if (batch > o.most)
      return absl::StrCat("--batches has ", batch, ", more than --max-batch ", o.most);
  }
  return std::nullopt;
}

}  // namespace

std::optional<int> ReadPoliciesOptions(const Invocation& invocation, PoliciesBenchOptions* o,
                                       std::vector<std::string>* policies) {
  bool given_batches = false, no_trace = false, only_overlap = false;
  Flags flags("sluice-bench policies", kAbout, kExamples);
  flags.Text("model", "DIR", "Hugging Face directory", &o->model);
  flags.Switch("dummy", "weights from the formula: config.json is enough", &o->dummy);
  flags.Choice("device", {"cpu", "cuda"}, "where it runs", &o->device);
  flags.Text("kernels", "PATH", "CPU kernels: auto, portable, avx2, avx512bf16, amx", &o->kernels);
  flags.Integer("threads", "threads that compute; 0: one per core", 0, 1024, &o->threads);
  flags.Integer("workers", "CPU workers that attend to what is not in HBM", 1, 1024, &o->workers);
  flags.Text("policies", "A,B,C",
             absl::StrCat("any of ", absl::StrJoin(PolicyNames(), ", "), "; with :KEY=VALUE of ",
                          absl::StrJoin(PolicySettings(), ", ")),
             &o->policies);
  flags.Text("hbm-bytes", "SIZE", "HBM for caches, the same for each policy", &o->hbm_bytes);
  flags.Text("dram-bytes", "SIZE", "DRAM for homes, the same for each policy", &o->dram_bytes);
  flags.Integers("contexts", "tokens that each sequence is handed over with", 32, 1 << 20,
                 &o->contexts);
  flags.Integers("batches", "sequences that decode together, beside the largest number that fits",
                 1, 4096, &o->batches);
  flags.Integer("max-batch", "sequences at most", 1, 4096, &o->most);
  flags.Integer("distinct", "different contexts at most, which are handed over in turn", 1, 64,
                &o->distinct);
  flags.Switch("given-batches", "only --batches, not the largest that fits", &given_batches);
  flags.Switch("no-trace", "no traced run of each: no idle share, no timeline", &no_trace);
  flags.Integer("hgca-window", "newest tokens that policy hgca has in HBM", 16, 1 << 20,
                &o->hgca_window);
  flags.Integer("steps", "steps of each of four windows, and of the trace", 1, 100'000, &o->steps);
  flags.Integer("budget", "tokens selected for each layer and KV head", 16, 1 << 20, &o->budget);
  flags.Integer("block-tokens", "tokens of a cache block", 16, 1024, &o->block_tokens);
  flags.Integer("dense-layers", "first layers that stay wholly in HBM", 0, 1024, &o->dense_layers);
  flags.Text("policy-profile", "FILE", "what sluice-profile measured of this model",
             &o->policy_profile);
  flags.Text("texts", "FILE", "texts as tokens (tools/sluice texts); else random tokens",
             &o->texts);
  flags.Integer("seed", "of random tokens, and of a workload", 1, 1 << 30, &o->seed);
  flags.Switch("no-recall", "policy scout never recalls a block", &o->no_recall);
  flags.Switch("topic-drift", "weights and contexts of the topic-drift workload", &o->topic_drift);
  flags.Integer("statistics", "steps over which the workload is looked at first; 0: not at all", 0,
                1000, &o->statistics);
  std::string drifts = absl::StrCat(o->drift.drift);
  flags.Text("drift", "X,X,...", "of the way to the next topic that a token goes", &drifts);
  flags.Number("noise", "a token's own part of its embedding, its topic's being 1", 0, 100,
               &o->drift.noise);
  flags.Number("head-change", "a query head's part of its own, its KV head's being 1", 0, 100,
               &o->drift.head_change);
  flags.Number("layer-change", "what a layer adds to the residual, as a part of it", 0, 10,
               &o->drift.layer_change);
  flags.Number("sharpness", "logit of two equal embeddings", 0, 1000, &o->drift.sharpness);
  flags.Integer("topics", "of the path", 1, 1 << 20, &o->topics);
  flags.Integer("segment", "tokens of the path that a context has at a time", 1, 1 << 20,
                &o->segment);
  flags.Number("slowest", "drift of the slowest path, of models with an indexer", 0, 1,
               &o->latent_drift.slowest);
  flags.Number("fastest", "drift of the fastest", 0, 1, &o->latent_drift.fastest);
  flags.Integer("paths", "of which each layer's indexer sees one", 1, 64, &o->paths);
  flags.Switch("overlap", "what transfers cost a step, with the indexer's own selections",
               &o->overlap);
  flags.Integers("misses", "the same with selections that miss so many entries", 0, 2048,
                 &o->set_misses);
  flags.Switch("only-overlap", "nothing but --overlap and --misses", &only_overlap);
  flags.Text("forecast-dram", "SIZE",
             "say what policies measured at two batches or more would do with so much DRAM",
             &o->forecast_dram);
  flags.Text("forecast-hbm", "SIZE", "and with so much HBM; without it that of the runs",
             &o->forecast_hbm);
  flags.Switch("quality",
               "compare logits and pass keys with full, at a budget of a quarter of the context",
               &o->quality);
  flags.Integer("quality-texts", "texts at most", 0, 1000, &o->quality_texts);
  flags.Integer("quality-steps", "tokens dictated after each context", 1, 65536, &o->quality_steps);
  flags.Integer("passkeys", "pass keys at most", 0, 1000, &o->passkeys);
  flags.Text("out", "DIR", "write the report and a trace of each run there", &o->out);
  flags.File("json", "write the report as JSON, without FILE to standard output", &o->json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  o->largest = !given_batches;
  o->trace = !no_trace;
  o->runs = !only_overlap;
  for (const auto part : absl::StrSplit(drifts, ',')) {
    double drift = 0;
    if (!absl::SimpleAtod(part, &drift) || !(drift >= 0 && drift <= 1)) {
      return Usage(absl::StrCat("--drift takes numbers from 0 to 1, but is '", drifts, "'"));
    }
    o->drifts.push_back(drift);
  }
  // What is wrong with the model is said where it is loaded.
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(o->model);
  o->latent = config.ok() && config->latent.has_value();
  if (const auto wrong = Wrong(*o)) return Usage(*wrong);
  absl::StatusOr<std::vector<std::string>> parsed = ParsePolicies(o->policies);
  if (!parsed.ok()) return Usage(absl::StrCat("--policies: ", parsed.status().message()));
  *policies = *std::move(parsed);
  return std::nullopt;
}

std::string WorkloadName(const PoliciesBenchOptions& o, double drift) {
  if (!o.topic_drift) return o.texts.empty() ? "random tokens" : o.texts;
  if (o.latent) {
    return absl::StrFormat(
        "topic drift of indexers (%d paths, drift %g to %g, noise %g, head change %g, %d topics, "
        "segments of %d, seed %d)",
        o.paths, o.latent_drift.slowest, o.latent_drift.fastest, o.latent_drift.noise,
        o.latent_drift.head_change, o.topics, o.segment, o.seed);
  }
  return absl::StrFormat(
      "topic drift (drift %g, noise %g, head change %g, layer change %g, sharpness %g, %d topics, "
      "segments of %d, seed %d)",
      drift, o.drift.noise, o.drift.head_change, o.drift.layer_change, o.drift.sharpness, o.topics,
      o.segment, o.seed);
}

}  // namespace sluice::bench
