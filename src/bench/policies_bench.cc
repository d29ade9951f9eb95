// sluice-bench policies: attention policies side by side on the same sequences and under the same
// HBM cap, in one run: how many sequences each admits, how fast the real engine decodes them, what
// each moves and leaves to the CPU, and how far its logits are from those of full attention.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/bench_device.h"
#include "src/bench/chrome_trace.h"
#include "src/bench/policies_report.h"
#include "src/bench/policy_choice.h"
#include "src/bench/policy_quality.h"
#include "src/bench/policy_run.h"
#include "src/bench/subcommand.h"
#include "src/bench/topic_drift.h"
#include "src/bench/trace_summary.h"
#include "src/bench/workload_statistics.h"
#include "src/config/units.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice {
namespace {

constexpr char kAbout[] =
    R"(Runs attention policies side by side: the same sequences, the same HBM cap, the same engine.

Columns: the largest batch that the policy admits (marked *) and the batches asked for; tokens/s; time per
output token of one sequence, p50 and p99; the share of a traced run's time in which no kernel of the model
ran; of the budget what the CPU attended to or the link brought; of what was selected what lay in HBM; K and V
over the link in a step; steps from one recall of a layer to its next.

--topic-drift takes config.json alone and makes a model and contexts whose attention is sparse and drifts;
--statistics N says first how a workload behaves over N steps: how well queries are predicted, how fast the
important blocks change, and what of policy scout's budget the CPU gets if nothing is recalled.

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
)";

struct Options {
  std::string device = "cpu", model, kernels = "auto", policies = "full,scout,recall,hgca,oracle";
  std::string texts, json, out, hbm_bytes = "256MiB", dram_bytes = "2GiB";
  bool dummy = false, quality = false, topic_drift = false, no_recall = false;
  TopicDrift drift;
  int64_t topics = 256, segment = 96, statistics = 0;
  int64_t threads = 0, workers = 1, steps = 16, most = 16, seed = 1;
  int64_t budget = 512, dense_layers = 2, block_tokens = 32;
  int64_t quality_texts = 2, quality_steps = 64, passkeys = 4;
  std::vector<int64_t> contexts = {2048}, batches = {1};
  PolicyOptions policy;
};

class PoliciesBench {
 public:
  PoliciesBench(const Options& o, std::vector<std::string> policies, Report report)
      : options_(o),
        policies_(std::move(policies)),
        threads_(o.threads > 0 ? static_cast<int>(o.threads) : DefaultThreads()),
        out_(o.json),
        report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    std::vector<std::pair<std::string, std::string>> shape = {
        {"model", world_.model->config().name},
        {"device", absl::StrCat(options_.device, options_.device == "cpu" ? " device" : "")}};
    for (auto& entry : bench_device_->Shape()) shape.push_back(std::move(entry));
    report_.shape.insert(report_.shape.begin(), shape.begin(), shape.end());
    out_.Print(Preamble(report_));
    if (!options_.texts.empty()) {
      SLUICE_ASSIGN_OR_RETURN(texts_,
                              ReadQualityTexts(options_.texts, world_.model->config().vocab_size));
    }
    if (options_.quality) {
      SLUICE_RETURN_IF_ERROR(RunQuality());
    } else {
      for (const int64_t context : options_.contexts) {
        if (options_.statistics > 0) {
          SLUICE_RETURN_IF_ERROR(RunStatistics(static_cast<int>(context)));
        }
      }
      out_.Print("\n" + RunHeader());
      for (const int64_t context : options_.contexts) {
        SLUICE_RETURN_IF_ERROR(RunContext(static_cast<int>(context)));
      }
    }
    SLUICE_RETURN_IF_ERROR(WriteFolder());
    return out_.Finish(report_);
  }

 private:
  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, options_.kernels, threads_}));
    const int64_t longest = *std::max_element(options_.contexts.begin(), options_.contexts.end());
    Model::Options model;
    model.directory = options_.model;
    model.load_format = options_.dummy ? "dummy" : "auto";
    model.block_tokens = static_cast<int>(options_.block_tokens);
    model.max_rows = 512 + static_cast<int>(options_.most);
    model.max_logits = static_cast<int>(options_.most);
    if (!options_.quality) {
      model.max_context = static_cast<int>(longest) + PolicyRunTokens(steps());
    }
    if (options_.topic_drift) {
      model.weights = [this](const ModelConfig& config) { return DriftWeights(config); };
    }
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, &bench_device_->device()));
    world_.device = &bench_device_->device();
    world_.model = model_.get();
    world_.hbm_bytes = static_cast<int64_t>(*ParseBytes(options_.hbm_bytes));
    world_.dram_bytes = static_cast<int64_t>(*ParseBytes(options_.dram_bytes));
    world_.max_context = model_->max_context();
    world_.slots = static_cast<int>(options_.most);
    world_.options = options_.policy;
    world_.options.budget_tokens = static_cast<int>(options_.budget);
    world_.options.dense_layers = static_cast<int>(options_.dense_layers);
    world_.options.workers = static_cast<int>(options_.workers);
    world_.options.scout.recall = !options_.no_recall;
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<WeightSource>> DriftWeights(const ModelConfig& config) const {
    return TopicDriftWeights(config, Drift());
  }
  TopicDrift Drift() const {
    TopicDrift drift = options_.drift;
    drift.seed = static_cast<uint64_t>(options_.seed);
    drift.topics = static_cast<int>(options_.topics);
    drift.segment = static_cast<int>(options_.segment);
    drift.max_context =
        static_cast<int>(*std::max_element(options_.contexts.begin(), options_.contexts.end()));
    return drift;
  }

  int steps() const { return static_cast<int>(options_.steps); }

  // As many different contexts as the largest batch asks for, up to a few: their prefill takes
  // longer than what is measured.
  absl::StatusOr<std::vector<Context>> Contexts(int tokens) {
    constexpr int kMost = 4;
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<ContextMaker> maker,
                            ContextMaker::Create(tokens, world_.device, world_.model));
    SplitMix64 random(static_cast<uint64_t>(options_.seed));
    std::vector<Context> out;
    for (int i = 0; i < kMost; ++i) {
      std::vector<int32_t> ids;
      if (texts_.has_value()) {
        for (size_t t = 0; t < texts_->texts.size() && ids.empty(); ++t) {
          const auto& all = texts_->texts[(t + static_cast<size_t>(i)) % texts_->texts.size()].ids;
          if (all.size() >= static_cast<size_t>(tokens))
            ids.assign(all.begin(), all.begin() + tokens);
        }
        if (ids.empty()) {
          return absl::InvalidArgumentError(
              absl::StrCat("no text of --texts has ", tokens, " tokens"));
        }
      } else if (options_.topic_drift) {
        ids = TopicDriftContext(world_.model->config(), Drift(), tokens, PolicyRunTokens(steps()),
                                random);
      } else {
        const auto vocab = static_cast<uint64_t>(world_.model->config().vocab_size);
        for (int t = 0; t < tokens; ++t) ids.push_back(static_cast<int32_t>(random.Below(vocab)));
      }
      SLUICE_ASSIGN_OR_RETURN(out.emplace_back(), maker->Compute(ids));
    }
    return out;
  }

  absl::Status RunStatistics(int context) {
    SLUICE_ASSIGN_OR_RETURN(std::vector<Context> contexts, Contexts(context));
    // The path goes on.
    std::vector<int32_t> next;
    const auto more = static_cast<size_t>(options_.statistics);
    for (size_t i = 1; i <= more; ++i) {
      next.push_back(contexts[0].tokens.back() + static_cast<int32_t>(i));
    }
    SLUICE_ASSIGN_OR_RETURN(const WorkloadStatistics statistics,
                            MeasureWorkload(world_, contexts[0], next));
    SLUICE_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> shares,
                            MeasureShares(world_, contexts[0], next));
    out_.Print(StatisticsText(statistics, shares, context));
    report_.details["statistics"].push_back(StatisticsJson(statistics, shares, context));
    return absl::OkStatus();
  }

  absl::Status RunContext(int context) {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<Context> contexts, Contexts(context));
    for (const std::string& policy : policies_) {
      SLUICE_ASSIGN_OR_RETURN(PolicySetup setup, SetUpPolicy(world_, policy));
      const int largest = LargestBatch(setup, world_.slots, context + PolicyRunTokens(steps()));
      setup = PolicySetup();
      std::set<int> batches;
      for (const int64_t batch : options_.batches) batches.insert(static_cast<int>(batch));
      if (largest > 0) batches.insert(largest);
      for (const int batch : batches) {
        if (batch > largest) {
          out_.Print(NoRoomLine(policy, context, batch, largest));
          continue;
        }
        StepTrace trace;
        SLUICE_ASSIGN_OR_RETURN(const PolicyRun run,
                                RunPolicy(world_, policy, contexts, batch, steps(), &trace));
        out_.Print(RunLine(run, batch == largest));
        report_.figures.push_back(RunFigure(run));
        report_.details["runs"].push_back(RunJson(run, batch == largest));
        report_.details["traces"].push_back(ToJson(trace, Summarize(trace)));
        if (!options_.out.empty()) traces_.push_back(std::move(trace));
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunQuality() {
    out_.Print("\n" + QualityHeader());
    for (const int64_t context : options_.contexts) {
      QualityOptions quality;
      quality.context = static_cast<int>(context);
      quality.steps = static_cast<int>(options_.quality_steps);
      quality.texts = static_cast<int>(options_.quality_texts);
      // Pass keys have lengths of their own.
      quality.passkeys =
          context == options_.contexts.front() ? static_cast<int>(options_.passkeys) : 0;
      SLUICE_ASSIGN_OR_RETURN(
          const std::vector<PolicyQuality> found,
          MeasureQuality(world_, policies_, *texts_, quality, [](const std::string& done) {
            std::fprintf(stderr, "done: %s\n", done.c_str());
          }));
      for (const PolicyQuality& q : found) {
        out_.Print(QualityLine(q, quality.context));
        report_.details["quality"].push_back(QualityJson(q, quality.context));
        if (q.distance.steps() > 0) report_.figures.push_back(QualityFigure(q, quality.context));
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteFolder() {
    if (options_.out.empty()) return absl::OkStatus();
    const std::filesystem::path folder = options_.out;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      return absl::UnavailableError(absl::StrCat("--out ", options_.out, ": ", error.message()));
    }
    SLUICE_RETURN_IF_ERROR(WriteReport(report_, folder / "policies.json"));
    for (size_t i = 0; i < traces_.size(); ++i) {
      const nlohmann::json& run = report_.details["runs"][i];
      const std::string name =
          absl::StrCat("trace-", run["policy"].get<std::string>(), "-context-",
                       run["context"].get<int>(), "-batch-", run["batch"].get<int>(), ".json");
      SLUICE_RETURN_IF_ERROR(WriteChromeTrace({traces_[i]}, folder / name));
    }
    out_.Print(absl::StrCat("\nwritten: ", options_.out,
                            "/policies.json; traces beside it open in ui.perfetto.dev; "
                            "tools/sluice plot-policies --run ",
                            options_.out, " draws it\n"));
    return absl::OkStatus();
  }

  const Options options_;
  const std::vector<std::string> policies_;
  const int threads_;
  const Output out_;
  Report report_;
  std::unique_ptr<BenchDevice> bench_device_;
  std::unique_ptr<Model> model_;
  std::optional<QualityTexts> texts_;
  PolicyWorld world_;
  std::vector<StepTrace> traces_;  // of the runs, in their order; empty without --out
};

// What is wrong with the flags beyond what each says itself.
std::optional<std::string> Wrong(const Options& o) {
  if (o.model.empty()) return "--model is missing";
  if (o.topic_drift && !o.texts.empty()) return "--topic-drift and --texts exclude each other";
  if (o.statistics > 0 && !o.topic_drift) return "--statistics needs --topic-drift";
  if (o.statistics > 4 * o.steps) return "--statistics takes at most four times --steps";
  if (o.quality && o.texts.empty()) return "--quality needs --texts FILE (tools/sluice texts)";
  for (const auto& [flag, value] :
       {std::pair{"--hbm-bytes", o.hbm_bytes}, {"--dram-bytes", o.dram_bytes}}) {
    if (!ParseBytes(value).has_value()) {
      return absl::StrCat(flag, " takes a size such as 256MiB, but is '", value, "'");
    }
  }
  if (o.block_tokens % 16 != 0) return "--block-tokens takes a multiple of 16";
  for (const int64_t batch : o.batches) {
    if (batch > o.most)
      return absl::StrCat("--batches has ", batch, ", more than --max-batch ", o.most);
  }
  return std::nullopt;
}

std::string WorkloadName(const Options& o) {
  if (!o.topic_drift) return o.texts.empty() ? "random tokens" : o.texts;
  return absl::StrFormat(
      "topic drift (drift %g, noise %g, head change %g, layer change %g, sharpness %g, %d topics, "
      "segments of %d, seed %d)",
      o.drift.drift, o.drift.noise, o.drift.head_change, o.drift.layer_change, o.drift.sharpness,
      o.topics, o.segment, o.seed);
}

}  // namespace

int RunPoliciesBench(const Invocation& invocation) {
  Options o;
  Flags flags("sluice-bench policies", kAbout, kExamples);
  flags.Text("model", "DIR", "Hugging Face directory", &o.model);
  flags.Switch("dummy", "weights from the formula: config.json is enough", &o.dummy);
  flags.Choice("device", {"cpu", "cuda"}, "where it runs", &o.device);
  flags.Text("kernels", "PATH", "CPU kernels: auto, portable, avx2, avx512bf16, amx", &o.kernels);
  flags.Integer("threads", "threads that compute; 0: one per core", 0, 1024, &o.threads);
  flags.Integer("workers", "CPU workers that attend to what is not in HBM", 1, 1024, &o.workers);
  flags.Text("policies", "A,B,C", absl::StrCat("any of ", absl::StrJoin(PolicyNames(), ", ")),
             &o.policies);
  flags.Text("hbm-bytes", "SIZE", "HBM for caches, the same for each policy", &o.hbm_bytes);
  flags.Text("dram-bytes", "SIZE", "DRAM for homes, the same for each policy", &o.dram_bytes);
  flags.Integers("contexts", "tokens that each sequence is handed over with", 32, 1 << 20,
                 &o.contexts);
  flags.Integers("batches", "sequences that decode together, beside the largest number that fits",
                 1, 4096, &o.batches);
  flags.Integer("max-batch", "sequences at most", 1, 4096, &o.most);
  flags.Integer("steps", "steps of each of four windows, and of the trace", 1, 100'000, &o.steps);
  flags.Integer("budget", "tokens selected for each layer and KV head", 16, 1 << 20, &o.budget);
  flags.Integer("block-tokens", "tokens of a cache block", 16, 1024, &o.block_tokens);
  flags.Integer("dense-layers", "first layers that stay wholly in HBM", 0, 1024, &o.dense_layers);
  flags.Text("texts", "FILE", "texts as tokens (tools/sluice texts); else random tokens", &o.texts);
  flags.Integer("seed", "of random tokens, and of a workload", 1, 1 << 30, &o.seed);
  flags.Switch("no-recall", "policy scout never recalls a block", &o.no_recall);
  flags.Switch("topic-drift", "weights and contexts of the topic-drift workload", &o.topic_drift);
  flags.Integer("statistics", "steps over which the workload is looked at first; 0: not at all", 0,
                1000, &o.statistics);
  flags.Number("drift", "of the way to the next topic that a token goes", 0, 1, &o.drift.drift);
  flags.Number("noise", "a token's own part of its embedding, its topic's being 1", 0, 100,
               &o.drift.noise);
  flags.Number("head-change", "a query head's part of its own, its KV head's being 1", 0, 100,
               &o.drift.head_change);
  flags.Number("layer-change", "what a layer adds to the residual, as a part of it", 0, 10,
               &o.drift.layer_change);
  flags.Number("sharpness", "logit of two equal embeddings", 0, 1000, &o.drift.sharpness);
  flags.Integer("topics", "of the path", 1, 1 << 20, &o.topics);
  flags.Integer("segment", "tokens of the path that a context has at a time", 1, 1 << 20,
                &o.segment);
  flags.Switch("quality",
               "compare logits and pass keys with full, at a budget of a quarter of the context",
               &o.quality);
  flags.Integer("quality-texts", "texts at most", 0, 1000, &o.quality_texts);
  flags.Integer("quality-steps", "tokens dictated after each context", 1, 65536, &o.quality_steps);
  flags.Integer("passkeys", "pass keys at most", 0, 1000, &o.passkeys);
  flags.Text("out", "DIR", "write the report and a trace of each run there", &o.out);
  flags.File("json", "write the report as JSON, without FILE to standard output", &o.json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  if (const auto wrong = Wrong(o)) return Usage(*wrong);
  absl::StatusOr<std::vector<std::string>> policies = ParsePolicies(o.policies);
  if (!policies.ok()) return Usage(absl::StrCat("--policies: ", policies.status().message()));
  Report report = NewReport("policies", invocation);
  report.shape = {
      {"policies", o.policies},
      {"workload", WorkloadName(o)},
      {"contexts", absl::StrJoin(o.contexts, ",")},
      {"hbm", o.hbm_bytes},
      {"dram", o.dram_bytes},
      {"budget_tokens", o.quality ? "a quarter of the context" : absl::StrCat(o.budget)},
      {"dense_layers", absl::StrCat(o.dense_layers)},
      {"block_tokens", absl::StrCat(o.block_tokens)},
      {"workers", absl::StrCat(o.workers)}};
  const absl::StatusOr<int> status =
      PoliciesBench(o, *std::move(policies), std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice
