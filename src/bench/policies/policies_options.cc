#include "src/bench/policies/policies_options.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/bench/harness/policy_choice.h"
#include "src/bench/policies/traffic_report.h"
#include "src/bench/report/flags.h"
#include "src/config/units.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Runs attention policies side by side: the same sequences, the same HBM cap, the same engine.

The first table has these columns:
  batch        sequences that decode together; * marks the largest batch that the policy admits
  tokens/s     output tokens of the whole batch
  p50, p99 ms  time per output token of one sequence
  idle         share of a traced run's time in which no kernel of the model ran (waits, and kernels that
               only move K and V over the link, do not count as kernels of the model)
  busy         share of the time in which a CPU worker was busy, on average
  CPU          share of the budget that the CPU attended to or the link brought
  hits         share of the selection that lay in HBM
  link MB      K and V over the link in a step
  interval     steps between two recalls of a layer; of clo: lookups of a head between two misses
  ends         the resource that bounds the largest batch
The second table shows the bytes that a step must move in HBM, over the link (up: to the device, down: back)
and in DRAM, the floor that they set at the rates measured in this run, how close the step came to it, and the
policy's tokens/s over those of full at its largest batch (x full), beside the ratio of their floors.

Some policies are set by this bench alone, and the server does not offer them: oracle selects by the exact
attention weights, oracle-digest by block digests, ends takes the first and the newest blocks, random takes
random ones; offload-naive fetches every selected entry in every step. Three select by clo's hash codes in every
step: lru keeps 30 % of a sequence in HBM, hata all of it, and clo-fetch-all nothing; hata-paper and clo-paper have the
codes and the scores that HATA published. fluxion-fixed reads a twentieth of each head's tokens in blocks of 16, and
fluxion-hbm-digests has no hot blocks in HBM; fluxion-paper and fluxion-paper-fixed have digests in DRAM too, which the
CPU scores, as published. fluxion-synthetic runs a network of a real one's size that no model trained:
three heads of five stream, and the volume (equation 3) is 3.1 times smaller than that of fluxion-fixed. The names scout-*, clo-paper,
recall-fetch-all and ess-* are policies without one of their ideas. hgca-mean is hgca with the beta for which the CPU attends, on
average, to as many tokens as the budget leaves beside the window.
A policy's name may be followed by settings, as in recall:budget=20%, hgca:beta=0.5:window=1024 or
scout:interval=8. These settings exist in this bench alone:
  reduction=N          how a group's query heads share a score: 0 maximum, 1 mean, 2 sum of softmaxes
  average-reduction=N  (hgca) the same for its moving average: 0 or 1
  following=N          (hgca) tokens selected with the salient one that they follow; the paper has 0
  whole=0              (scout) the GPU attends to the selected blocks alone
  codes=0              (scout) blocks are selected by their digests alone
  controller=1         (scout) a controller decides when to recall, whatever --policy-profile says
  shortlist=N          (scout) key codes of N tokens less a 16th of the context are scored, at least of N / 2 tokens
  narrowed=X           (scout) how far digests are narrowed for the shortlist: 0 takes Quest's bound
  rehearsals=N         (scout) times that a first decode row is rehearsed
  drift=0              (scout) queries are predicted from the input of the layer before alone
  resident=N           (scout) tokens of recalled blocks that HBM has slots for
  rank=N               (recall) elements of a partial key
  similarity=X         (clo) cosine of a head's queries with those of its selection, from which on it stays
  divisor=N            (clo) a row selects an Nth of its tokens, if that is more than the budget; 0: the budget
  rule=N               (clo) how a group's cosines become one: 0 as published, 1 the least, 2 the mean
  refresh=0            (clo) a head that never misses never selects what left the ring, as published
  bits=N               (clo) bits of a hash code
  levels=1             (clo) queries have codes of signs, as HATA has them
  centred=0            (clo) codes are of whole keys, as HATA has them
  early=0              (clo) queries are predicted from the input of the layer before, as published
  persistent=X         (clo) share of the heads that lie wholly in HBM
  prefetchable=X       (clo) refills of a head, per row, that a layer hides: no more heads are persistent than that needs
  ahead=0              (clo) persistent heads select by a layer's own queries, as published
  replace=1            (clo) a head that misses fetches all that it selects, as published
  mover=WORD           (clo, ess) who brings what is fetched over the link: uva: the device reads it itself; cpu: CPU
                       workers gather it; auto (ess): whichever is faster, measured before the run
  mover-workers=N      (clo, ess) so many CPU workers gather, in two groups; without it 4 for clo, all for ess
  block=N              (fluxion) every query head reads blocks of N tokens, whatever the predictor says
  fixed-share=X        (fluxion) how much each then reads of what is not in HBM
  device-share=X       (fluxion) how much of that the device reads over the link; the CPU reads the others
  pull=1               (fluxion) the device and the CPU take parts of that until none is left
  schedule=WORD        (fluxion) who reads that: none: the CPU alone; uniform, length: whole lists are given to the device
                       before the step, by their number or by their sequences' lengths; parts: a share of each list
  streaming=0          (fluxion-synthetic) no head streams
  level=N              (fluxion-synthetic) all blocks have N tokens: 16, 32, 64 or 128; budgets are the network's
  hot=0                (fluxion) no block has a place in HBM for being selected often
  host-digests=1       (fluxion) digests lie in DRAM, and the CPU scores them and selects; hot=0, and no device-share
  skip=1, row-copies=1 (ess) fetch nothing; copy row by row from the host

--traffic times every step of sequences that do not march alike. steady: all have the longest of --contexts.
mixed: they have all of --contexts in turn. staggered: half begin together and end one by one, and the others arrive
while they decode. --jump N makes the workload's path jump to another topic every N tokens. The table has the gaps
between a sequence's tokens, and over the median step: the steps that were fed another topic, the three steps after
each, and the steps beside a sequence that waits for its first token.

auto is what sluice-server --policy auto would take for --max-batch sequences of each context, at the quality of
--auto-quality: exact (full or ess), high (budgets of an eighth to a quarter of the context) or fast (--budget). The
report has the forecast of each candidate and how far auto is from the best of the others of that quality.

--topic-drift reads config.json alone and makes a model and contexts whose attention is sparse and drifts.
--statistics N first measures the workload over N steps: how well queries are predicted, how fast the important
blocks change, and which share of policy scout's budget the CPU attends to if nothing is recalled. If --drift
has several values, everything runs for each of them. In a model with an indexer (DeepSeek-V3.2) each layer sees
one of --paths paths, from --slowest to --fastest; its contexts have the model's index keys, but other entries.

--overlap measures the cost of transfers in a step of policy ess and its variants: steps that fetch and steps
that do not alternate, with the same selections. --misses A,B,... does the same with selections that miss so
many entries per sequence, layer and step, while the indexer still runs. --only-overlap leaves out the rest.

--quality compares logits with policy full instead, on texts given as tokens (tools/sluice texts): each step
gets the text's own token. It also asks for pass keys that are hidden in a text. Only keys that full finds count.
A key that a policy loses is asked for again with one thing changed at a time, and the last columns say why it
was lost:
  score   the exact top blocks of the same budget find it: the policy scores its part too low
  age     it is found once each step has been computed four times: its part was selected or resident too late
  query   it is found with the queries that full has in place of the predicted ones
  CPU     it is found either way: CPU workers attended to its part with the predicted query
  budget  none of this helps, and the exact top blocks of the same budget do not find it either
)";
constexpr char kExamples[] =
    R"(  sluice-bench policies --model models/smollm2-135m-instruct --contexts 2048 --batches 1,4
  sluice-bench policies --model M --policies full,scout --hbm-bytes 64MiB --out policies-run
  tools/sluice texts --tokenizer models/smollm2-135m-instruct --out texts.json
  sluice-bench policies --model models/smollm2-135m-instruct --quality --texts texts.json
  sluice-bench policies --model M --quality --texts texts.json --quality-texts 0 --passkeys 24 --budget-shares 25
  sluice-bench policies --model configs/models/topic-drift-small --topic-drift --statistics 16 --dense-layers 0
  sluice-bench policies --model configs/models/topic-drift-small --topic-drift --contexts 512,2048 --batches 4 \
      --traffic steady,mixed,staggered --jump 24
  sluice-bench policies --device cuda --model configs/models/qwen3-14b --topic-drift --contexts 65536 \
      --distinct 2 --hbm-bytes 21GiB --dram-bytes 110GiB --budget 2048 --dense-layers 0 --workers 14
  sluice-bench policies --model configs/models/topic-drift-indexer-small --topic-drift --paths 4 \
      --policies ess-da:ratio=0.2:least=256,ess-dba:ratio=0.2:least=256 --batches 4 --given-batches \
      --misses 0,16,64 --only-overlap
)";

// Returns what is wrong with the combination of flags; each flag has checked its own value.
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
    if (flag == absl::string_view("--hbm-bytes") && value == "auto") continue;
    if (!ParseBytes(value).has_value()) {
      return absl::StrCat(flag, " takes a size such as 256MiB, but is '", value, "'");
    }
  }
  if (o.latent && o.statistics > 0) return "--statistics is for models without latent caches";
  if (o.latent && o.quality) return "--quality is for models without latent caches";
  if (o.latent && o.drifts.size() > 1)
    return "--drift takes one value for models with an indexer: set --slowest and --fastest";
  if (!o.topic_drift && o.drifts.size() > 1) return "--drift needs --topic-drift";
  if (!o.runs && !o.overlap && o.forced_misses.empty()) {
    return "--only-overlap needs --overlap or --misses";
  }
  if (!o.latent && (o.overlap || !o.forced_misses.empty())) {
    return "--overlap and --misses are for models with latent caches and an indexer";
  }
  if (o.jump > 0 && (!o.topic_drift || o.latent)) {
    return "--jump needs --topic-drift and a model with keys and values";
  }
  if (!o.traffic.empty()) {
    if (const auto traffics = ParseTraffics(o.traffic); !traffics.ok()) {
      return absl::StrCat("--traffic: ", traffics.status().message());
    }
    if (o.quality || o.overlap || !o.forced_misses.empty()) {
      return "--traffic excludes --quality, --overlap and --misses";
    }
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
  bool given_batches = false, no_trace = false, only_overlap = false, no_blame = false;
  Flags flags("sluice-bench policies", kAbout, kExamples);
  flags.Text("model", "DIR", "Hugging Face directory", &o->model);
  flags.Switch("dummy", "use formula weights: only config.json is read", &o->dummy);
  flags.Choice("device", {"cpu", "cuda"}, "device that the model runs on", &o->device);
  flags.Text("kernels", "PATH", "CPU kernels: auto, portable, avx2, avx512bf16, amx", &o->kernels);
  flags.Integer("threads", "compute threads; 0: one per core", 0, 1024, &o->threads);
  flags.Integer("workers", "CPU workers that attend to K and V outside HBM", 1, 1024, &o->workers);
  flags.Text("policies", "A,B,C",
             absl::StrCat("any of ", absl::StrJoin(PolicyNames(), ", "),
                          "; a name may be followed by :KEY=VALUE, where KEY is one of ",
                          absl::StrJoin(PolicySettings(), ", ")),
             &o->policies);
  flags.Choice("auto-quality", {"exact", "high", "fast"}, "what policy auto may take",
               &o->auto_quality);
  flags.Text("hbm-bytes", "SIZE",
             "HBM for KV caches, the same for each policy; auto: nine tenths of what is free",
             &o->hbm_bytes);
  flags.Text("dram-bytes", "SIZE", "DRAM for host KV caches, the same for each policy",
             &o->dram_bytes);
  flags.Integers("contexts", "tokens of each sequence's context", 32, 1 << 20, &o->contexts);
  flags.Integers("batches", "batch sizes, in addition to the largest that fits", 1, 4096,
                 &o->batches);
  flags.Integer("max-batch", "maximum sequences", 1, 4096, &o->most);
  flags.Integer("distinct", "maximum number of different contexts, which sequences use in turn", 1,
                64, &o->distinct);
  flags.Switch("given-batches", "run only --batches, not the largest batch that fits",
               &given_batches);
  flags.Switch("no-trace", "leave out the traced runs, and so idle shares and timelines",
               &no_trace);
  flags.Integer("hgca-window", "newest tokens that policy hgca keeps in HBM", 16, 1 << 20,
                &o->hgca_window);
  flags.Integer("steps", "steps in each of the four windows, and in the trace", 1, 100'000,
                &o->steps);
  flags.Integer("budget", "tokens selected per layer and KV head", 16, 1 << 20, &o->budget);
  flags.Integer("block-tokens", "tokens in a KV block", 16, 1024, &o->block_tokens);
  flags.Integer("dense-layers", "number of first layers that stay wholly in HBM", 0, 1024,
                &o->dense_layers);
  flags.Text("policy-profile", "FILE", "this model's profile, from sluice-profile",
             &o->policy_profile);
  flags.Text(
      "fluxion-predictor", "FILE",
      "this model's predictor, from sluice-profile fluxion train; without it, policy fluxion "
      "reads everything",
      &o->fluxion_predictor);
  flags.Text("texts", "FILE", "texts as tokens (tools/sluice texts); without it, random tokens",
             &o->texts);
  flags.Integer("seed", "seed of random tokens and of the workload", 1, 1 << 30, &o->seed);
  flags.Switch("no-recall", "policy scout recalls blocks only in a sequence's first step",
               &o->no_recall);
  flags.Switch("topic-drift", "use the weights and contexts of the topic-drift workload",
               &o->topic_drift);
  flags.Integer("statistics", "steps over which the workload is measured first; 0: none", 0, 1000,
                &o->statistics);
  std::string drifts = absl::StrCat(o->drift.drift);
  flags.Text("drift", "X,X,...", "fraction of the way to the next topic per token", &drifts);
  flags.Number("noise", "a token's own part of its embedding; its topic's part is 1", 0, 100,
               &o->drift.noise);
  flags.Number("head-change", "a query head's own part; its KV head's part is 1", 0, 100,
               &o->drift.head_change);
  flags.Number("layer-change", "size of a layer's addition relative to the residual", 0, 10,
               &o->drift.layer_change);
  flags.Number("turning-heads", "share of the KV heads whose queries turn with a path of their own",
               0, 1, &o->drift.turning_heads);
  flags.Number("turning", "drift of that path", 0, 1, &o->drift.turning);
  flags.Number("sharpness", "logit of two equal embeddings", 0, 1000, &o->drift.sharpness);
  flags.Integer("topics", "topics of the path", 1, 1 << 20, &o->topics);
  flags.Integer("segment", "consecutive tokens of the path in a context", 1, 1 << 20, &o->segment);
  flags.Integer("jump", "tokens of the path between jumps to other topics; 0: none", 0, 1 << 20,
                &o->jump);
  flags.Text("traffic", "A,B,C",
             "run steady, mixed or staggered sequences of --contexts at --batches, timed by step",
             &o->traffic);
  flags.Number("slowest", "drift of the slowest path (models with an indexer)", 0, 1,
               &o->latent_drift.slowest);
  flags.Number("fastest", "drift of the fastest path (models with an indexer)", 0, 1,
               &o->latent_drift.fastest);
  flags.Integer("paths", "number of paths; each layer's indexer sees one", 1, 64, &o->paths);
  flags.Switch("overlap",
               "measure the cost of transfers in a step, with the indexer's own selections",
               &o->overlap);
  flags.Integers("misses", "the same with selections that miss so many entries", 0, 2048,
                 &o->forced_misses);
  flags.Switch("only-overlap", "run only --overlap and --misses", &only_overlap);
  flags.Text("forecast-dram", "SIZE",
             "forecast the policies measured at two batches or more with so much DRAM",
             &o->forecast_dram);
  flags.Text("forecast-hbm", "SIZE", "HBM of that forecast; without it, the HBM of the runs",
             &o->forecast_hbm);
  flags.Switch("quality",
               "compare logits and pass keys with full, at shares of the context as budgets",
               &o->quality);
  std::string shares = "12.5,25";
  flags.Text("budget-shares", "P,P,...",
             "budgets of --quality, in percent of each case's own context", &shares);
  flags.Integer("quality-texts", "maximum number of texts", 0, 1000, &o->quality_texts);
  flags.Integer("quality-steps", "tokens dictated after each context", 1, 65536, &o->quality_steps);
  flags.Integer("passkeys", "maximum number of pass keys; the first ones are a sample of all", 0,
                1000, &o->passkeys);
  flags.Switch("no-blame", "do not run lost pass keys again to see why they were lost", &no_blame);
  flags.Text("out", "DIR", "folder for the report and a trace of each run", &o->out);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o->json);
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
  o->blame = !no_blame;
  for (const auto part : absl::StrSplit(shares, ',')) {
    double percent = 0;
    if (!absl::SimpleAtod(part, &percent) || !(percent > 0 && percent <= 100)) {
      return Usage(absl::StrCat("--budget-shares takes percentages above 0 and up to 100, but is '",
                                shares, "'"));
    }
    o->budget_shares.push_back(percent / 100);
  }
  // Errors of the model are reported where it is loaded.
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(o->model);
  o->latent = config.ok() && config->latent.has_value();
  if (const auto wrong = Wrong(*o)) return Usage(*wrong);
  absl::StatusOr<std::vector<std::string>> parsed = ParsePolicies(o->policies);
  if (!parsed.ok()) return Usage(absl::StrCat("--policies: ", parsed.status().message()));
  *policies = *std::move(parsed);
  const bool plain_runs =
      !o->quality && !o->overlap && o->forced_misses.empty() && o->traffic.empty();
  if (!plain_runs && std::any_of(policies->begin(), policies->end(), IsAuto)) {
    return Usage("--policies: auto is not for --quality, --overlap, --misses and --traffic");
  }
  return std::nullopt;
}

int64_t HbmBytesOf(const PoliciesBenchOptions& o, const Device& device, int64_t contexts) {
  if (const auto given = ParseBytes(o.hbm_bytes); given.has_value()) {
    return static_cast<int64_t>(*given);
  }
  const Device::DeviceMemory memory = device.Memory();
  if (memory.total_bytes == 0) return int64_t{1} << 30;  // The host's memory is everyone's.
  const int64_t free = memory.free_bytes - contexts;
  return std::max(free - std::max(free / 20, int64_t{4} << 30), int64_t{1} << 30);
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
      "segments of %d, seed %d)%s",
      drift, o.drift.noise, o.drift.head_change, o.drift.layer_change, o.drift.sharpness, o.topics,
      o.segment, o.seed,
      absl::StrCat(o.drift.turning_heads > 0
                       ? absl::StrFormat(", %g of the KV heads turn with a path of drift %g",
                                         o.drift.turning_heads, o.drift.turning)
                       : "",
                   o.jump > 0 ? absl::StrCat(", jumps every ", o.jump, " tokens") : ""));
}

}  // namespace sluice::bench
