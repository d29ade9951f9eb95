// sluice-bench policies: compares attention policies on the same sequences and under the same HBM
// cap, in one run: how many sequences each admits, how fast the real engine decodes them, how many
// bytes each moves and leaves to the CPU, and how far its logits are from those of full attention.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/attention/policy_profile.h"
#include "src/base/logging.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/policy_choice.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/scout_shares.h"
#include "src/bench/policies/auto_run.h"
#include "src/bench/policies/latent_report.h"
#include "src/bench/policies/policies_options.h"
#include "src/bench/policies/policies_report.h"
#include "src/bench/policies/policy_quality.h"
#include "src/bench/policies/quality_report.h"
#include "src/bench/policies/traffic_report.h"
#include "src/bench/policies/workload_statistics.h"
#include "src/bench/report/run_clock.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/trace/chrome_trace.h"
#include "src/bench/trace/layer_timeline.h"
#include "src/bench/trace/trace_summary.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/latent_context.h"
#include "src/bench/workload/topic_drift.h"
#include "src/config/units.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice::bench {
namespace {

class PoliciesBench {
 public:
  PoliciesBench(const PoliciesBenchOptions& o, std::vector<std::string> policies, Report report)
      : options_(o),
        policies_(std::move(policies)),
        threads_(o.threads > 0 ? static_cast<int>(o.threads) : DefaultThreads()),
        out_(o.json),
        report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, options_.kernels, threads_}));
    for (const double drift : options_.drifts) SLUICE_RETURN_IF_ERROR(RunDrift(drift));
    report_.details["seconds"] = clock_.ToJson();
    if (!options_.out.empty()) {
      SLUICE_RETURN_IF_ERROR(WriteFolder());
      TellFolder();
    }
    out_.Print("\n" + clock_.ToText());
    const int status = out_.Finish(report_);
    return report_.details.contains("failures") ? 1 : status;
  }

 private:
  absl::Status RunDrift(double drift) {
    drift_ = drift;
    SLUICE_RETURN_IF_ERROR(Load());
    if (drift == options_.drifts.front()) SLUICE_RETURN_IF_ERROR(Introduce());
    if (options_.drifts.size() > 1) {
      out_.Print(absl::StrCat("\n== ", WorkloadName(options_, drift), "\n"));
    }
    if (options_.quality) return RunQuality();
    if (!options_.traffic.empty()) return RunTraffics();
    for (const int64_t context : options_.contexts) {
      SLUICE_RETURN_IF_ERROR(RunContext(static_cast<int>(context)));
    }
    return absl::OkStatus();
  }

  // Prints the part of the report before the first figure.
  absl::Status Introduce() {
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
    if (options_.quality) return absl::OkStatus();
    clock_.Begin("rates");
    SLUICE_ASSIGN_OR_RETURN(rates_,
                            bench_device_->MeasureRates(static_cast<int>(options_.workers)));
    clock_.Pause();
    report_.details["rates"] = ToJson(rates_.memory);
    out_.Print(RatesText(rates_.memory, static_cast<int>(options_.workers)));
    return absl::OkStatus();
  }

  absl::Status Load() {
    clock_.Begin("weights");
    // Frees the memory of the previous drift's model first.
    model_ = nullptr;
    const int64_t longest = *std::max_element(options_.contexts.begin(), options_.contexts.end());
    Model::Options model;
    model.directory = options_.model;
    model.load_format = options_.dummy ? "dummy" : "auto";
    model.block_tokens = static_cast<int>(options_.block_tokens);
    model.max_rows = 512 + static_cast<int>(options_.most);
    model.max_logits = static_cast<int>(options_.most);
    if (!options_.quality) {
      model.max_context = static_cast<int>(longest) + RunTokens();
    }
    if (options_.topic_drift) {
      model.weights = [this](const ModelConfig& config) {
        return config.latent.has_value() ? LatentDriftWeights(config, PathsOfDrift())
                                         : TopicDriftWeights(config, Drift());
      };
    }
    if (options_.latent) model.kv_dtype = DType::kFloat8E4M3;
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, &bench_device_->device()));
    twin_ = options_.latent && options_.topic_drift ? std::optional(model) : std::nullopt;
    world_.device = &bench_device_->device();
    world_.model = model_.get();
    world_.max_context = model_->max_context();
    world_.slots = static_cast<int>(options_.most);
    world_.options = options_.policy;
    world_.options.budget_tokens = static_cast<int>(options_.budget);
    world_.options.dense_layers = static_cast<int>(options_.dense_layers);
    world_.options.workers = static_cast<int>(options_.workers);
    world_.options.scout.recall = !options_.no_recall;
    world_.options.hgca.window_tokens = static_cast<int>(options_.hgca_window);
    if (!options_.policy_profile.empty()) {
      SLUICE_ASSIGN_OR_RETURN(const PolicyProfile profile,
                              ReadPolicyProfile(options_.policy_profile));
      SLUICE_RETURN_IF_ERROR(ApplyPolicyProfile(profile, model_->fingerprint(),
                                                model_->cache_layout(), &world_.options));
    }
    if (!options_.fluxion_predictor.empty()) {
      SLUICE_ASSIGN_OR_RETURN(
          world_.options.fluxion.predictor,
          LoadFluxionPredictor(options_.fluxion_predictor, model_->fingerprint()));
    }
    clock_.Pause();
    return absl::OkStatus();
  }

  // Makes the tiers' memory, if there is none, and pools in it. `more` bytes of contexts are still
  // to be made. Called once those of the first run are there, because they lie in the GPU's memory
  // and hbm-bytes may be all that is left.
  absl::Status MakeTiers(int64_t more) {
    if (tiers_ == nullptr) {
      clock_.Begin("pools");
      SLUICE_ASSIGN_OR_RETURN(
          tiers_, BenchTiers::Create(*world_.device, HbmBytesOf(options_, *world_.device, more),
                                     static_cast<int64_t>(*ParseBytes(options_.dram_bytes))));
    }
    clock_.Pause();
    return tiers_->Cut(&world_, "full");
  }

  TopicDrift Drift() const {
    TopicDrift drift = options_.drift;
    drift.drift = drift_;
    drift.seed = static_cast<uint64_t>(options_.seed);
    drift.topics = static_cast<int>(options_.topics);
    drift.segment = static_cast<int>(options_.segment);
    drift.jump = static_cast<int>(options_.jump);
    drift.max_context =
        static_cast<int>(*std::max_element(options_.contexts.begin(), options_.contexts.end()));
    return drift;
  }

  LatentDrift PathsOfDrift() const {
    LatentDrift drift = options_.latent_drift;
    drift.seed = static_cast<uint64_t>(options_.seed);
    drift.topics = static_cast<int>(options_.topics);
    drift.paths = static_cast<int>(options_.paths);
    return drift;
  }

  int steps() const { return static_cast<int>(options_.steps); }

  // Returns the tokens that any run needs beyond the context.
  int RunTokens() const {
    return std::max({PolicyRunTokens(steps()), latent_report_.Tokens(),
                     ShareTokens(static_cast<int>(options_.statistics)) + 1});
  }

  // Returns only a few contexts: their prefill takes longer than the measurements.
  absl::StatusOr<std::vector<Context>> Contexts(int tokens) {
    std::unique_ptr<Model> twin;
    std::unique_ptr<ContextMaker> maker;
    if (twin_.has_value()) {
      clock_.Begin("contexts", "a twin of the model");
      SLUICE_ASSIGN_OR_RETURN(twin, LoadTwin(*twin_, PathsOfDrift(), world_.device));
      SLUICE_ASSIGN_OR_RETURN(maker, NewTwinContextMaker(tokens, world_.device, twin.get()));
    } else {
      SLUICE_ASSIGN_OR_RETURN(maker, ContextMaker::Create(tokens, world_.device, world_.model));
    }
    SplitMix64 random(static_cast<uint64_t>(options_.seed));
    std::vector<Context> out;
    for (int i = 0; i < static_cast<int>(options_.distinct); ++i) {
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
        ids = TopicDriftContext(world_.model->config(), Drift(), tokens, RunTokens(), random);
      } else {
        const auto vocab = static_cast<uint64_t>(world_.model->config().vocab_size);
        for (int t = 0; t < tokens; ++t) ids.push_back(static_cast<int32_t>(random.Below(vocab)));
      }
      clock_.Begin("contexts", absl::StrCat(i + 1, " of ", options_.distinct));
      SLUICE_ASSIGN_OR_RETURN(out.emplace_back(), maker->Compute(ids));
    }
    clock_.Pause();
    return out;
  }

  absl::Status RunStatistics(const std::vector<Context>& contexts) {
    const int context = static_cast<int>(contexts[0].tokens.size());
    // Dictates the continuation of the path.
    std::vector<int32_t> next;
    const auto more = static_cast<size_t>(options_.statistics);
    for (size_t i = 1; i <= more; ++i) {
      next.push_back(contexts[0].tokens.back() + static_cast<int32_t>(i));
    }
    clock_.Begin("statistics");
    SLUICE_ASSIGN_OR_RETURN(const WorkloadStatistics statistics,
                            MeasureWorkload(world_, contexts[0], next));
    SLUICE_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> shares,
                            MeasureShares(world_, contexts[0], static_cast<int>(more)));
    clock_.Pause();
    out_.Print(StatisticsText(statistics, shares, context));
    nlohmann::json found = StatisticsJson(statistics, shares, context);
    found["drift"] = drift_;
    report_.details["statistics"].push_back(std::move(found));
    return absl::OkStatus();
  }

  absl::Status RunContext(int context) {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<Context> contexts, Contexts(context));
    // The next contexts, and the caches of the one that is being computed.
    const int64_t longest = *std::max_element(options_.contexts.begin(), options_.contexts.end());
    SLUICE_RETURN_IF_ERROR(MakeTiers(options_.contexts.size() == 1
                                         ? 0
                                         : (options_.distinct + 1) *
                                               ArenaBytes(world_.model->cache_layout(), longest)));
    if (options_.statistics > 0) SLUICE_RETURN_IF_ERROR(RunStatistics(contexts));
    if (options_.latent) {
      SLUICE_RETURN_IF_ERROR(latent_report_.Similarity(*tiers_, &world_, policies_, contexts));
    }
    if (options_.runs) out_.Print("\n" + RunHeader());
    std::vector<PolicyRun> runs;
    std::optional<AutoRun> taken;
    absl::Status health;
    for (const std::string& policy : policies_) {
      const absl::Status status = IsAuto(policy) ? RunAuto(policy, contexts, &taken, &runs)
                                                 : RunOnePolicy(policy, policy, contexts, &runs);
      if (status.ok()) continue;
      clock_.Pause();
      out_.Print(absl::StrCat(policy, ": ", status.ToString(), "\n"));
      report_.details["failures"].push_back(
          {{"policy", policy}, {"context", context}, {"status", status.ToString()}});
      // Goes on with the other policies, unless the device no longer works.
      health = world_.device->Health();
      if (!health.ok()) break;
    }
    // All runs are compared with full at its largest batch.
    const auto full = std::find_if(runs.begin(), runs.end(), [](const PolicyRun& run) {
      return run.policy == "full" && run.largest;
    });
    if (!runs.empty()) out_.Print("\n" + FloorHeader());
    for (const PolicyRun& run : runs) {
      const PolicyRun* const base = full == runs.end() ? nullptr : &*full;
      out_.Print(FloorLine(run, rates_.memory, base));
      report_.details["runs"][next_json_++].update(FloorJson(run, rates_.memory, base));
    }
    out_.Print(ScoutRatios(runs));
    if (taken.has_value()) {
      out_.Print(AutoDistanceText(*taken, runs));
      report_.details["auto"].push_back(AutoJson(*taken, runs));
    }
    out_.Print(MissesText(runs));
    latent_report_.Finish(runs);
    return health;
  }

  // Takes a policy as a node would, and runs it under the name auto.
  absl::Status RunAuto(const std::string& label, const std::vector<Context>& contexts,
                       std::optional<AutoRun>* taken, std::vector<PolicyRun>* runs) {
    const int context = static_cast<int>(contexts[0].tokens.size());
    clock_.Begin("choice of auto");
    SLUICE_ASSIGN_OR_RETURN(
        *taken, TakePolicy(*tiers_, &world_, rates_, QualityOf(options_.auto_quality), context,
                           context + RunTokens()));
    clock_.Pause();
    out_.Print((*taken)->text);
    return RunOnePolicy(label, (*taken)->name, contexts, runs);
  }

  // Runs the policy of that name; reports call it `label`.
  absl::Status RunOnePolicy(const std::string& label, const std::string& policy,
                            const std::vector<Context>& contexts, std::vector<PolicyRun>* runs) {
    const int context = static_cast<int>(contexts[0].tokens.size());
    SLUICE_RETURN_IF_ERROR(tiers_->Cut(&world_, policy));
    PolicyWorld world = world_;
    if (WantsMeanSelection(policy)) {
      clock_.Begin("beta of hgca", policy);
      const double wanted = world.options.budget_tokens - world.options.hgca.window_tokens;
      SLUICE_ASSIGN_OR_RETURN(const MeanSelection found,
                              FindMeanSelection(world, policy, contexts, wanted));
      world.options.hgca.beta = found.beta;
      out_.Print(absl::StrFormat("%s: with beta %.4g the CPU attends to %.0f tokens on average\n",
                                 policy, found.beta, found.tokens));
    }
    clock_.Begin("admission", policy);
    absl::StatusOr<std::unique_ptr<AttentionPolicy>> made = SetUpPolicy(world, policy);
    if (!made.ok()) return made.status();
    const Admission admission = LargestBatch(world, **made, context, context + RunTokens());
    const int largest = admission.batch;
    made->reset();
    std::set<int> batches;
    for (const int64_t batch : options_.batches) batches.insert(static_cast<int>(batch));
    if (largest > 0 && options_.largest) batches.insert(largest);
    for (const int batch : batches) {
      if (batch > largest) {
        out_.Print(NoRoomLine(policy, context, batch, largest));
        continue;
      }
      clock_.Begin(policy, absl::StrCat("context ", context, ", batch ", batch));
      SLUICE_RETURN_IF_ERROR(latent_report_.Overlap(world, policy, contexts, batch, &traces_));
      if (!options_.runs) continue;
      StepTrace trace;
      SLUICE_ASSIGN_OR_RETURN(PolicyRun run, RunPolicy(world, policy, contexts, batch, steps(),
                                                       options_.trace ? &trace : nullptr));
      clock_.Pause();
      run.largest = batch == largest;
      run.admission = admission;
      run.beta = world.options.hgca.beta;
      run.policy = label;
      if (label != policy) run.taken = policy;
      out_.Print(RunLine(run));
      report_.figures.push_back(RunFigure(run));
      if (options_.drifts.size() > 1)
        absl::StrAppend(&report_.figures.back().name, ", drift ", drift_);
      nlohmann::json found = RunJson(run);
      found["drift"] = drift_;
      report_.details["runs"].push_back(std::move(found));
      if (options_.trace) {
        nlohmann::json summary = ToJson(trace, Summarize(trace));
        summary["timeline"] = LayerTimeline(trace, world.model->config().layers);
        report_.details["traces"].push_back(std::move(summary));
        if (!options_.out.empty()) traces_.push_back(std::move(trace));
      }
      runs->push_back(std::move(run));
    }
    clock_.Pause();
    // Writes the results so far, so that they survive a later failure.
    return options_.out.empty() ? absl::OkStatus() : WriteFolder();
  }

  absl::Status RunTraffics() {
    std::vector<int64_t> lengths = options_.contexts;
    std::sort(lengths.begin(), lengths.end());
    std::vector<Context> contexts;
    for (const int64_t length : lengths) {
      SLUICE_ASSIGN_OR_RETURN(std::vector<Context> made, Contexts(static_cast<int>(length)));
      std::move(made.begin(), made.end(), std::back_inserter(contexts));
    }
    SLUICE_RETURN_IF_ERROR(MakeTiers(0));
    out_.Print("\n" + TrafficHeader());
    for (const std::string& policy : policies_) {
      SLUICE_RETURN_IF_ERROR(
          traffic_report_.Run(*tiers_, &world_, policy, contexts, lengths.size()));
      if (!options_.out.empty()) SLUICE_RETURN_IF_ERROR(WriteFolder());
    }
    return absl::OkStatus();
  }

  absl::Status RunQuality() {
    SLUICE_RETURN_IF_ERROR(MakeTiers(0));
    for (const int64_t context : options_.contexts) {
      QualityOptions quality;
      quality.context = static_cast<int>(context);
      quality.steps = static_cast<int>(options_.quality_steps);
      quality.texts = static_cast<int>(options_.quality_texts);
      quality.budget_shares = options_.budget_shares;
      quality.blame = options_.blame;
      // Pass keys have lengths of their own, so they run once.
      quality.passkeys =
          context == options_.contexts.front() ? static_cast<int>(options_.passkeys) : 0;
      const absl::Time begin = absl::Now();
      const auto progress = [&](const std::string& phase, const std::string& detail, double done,
                                const QualityResult& so_far) {
        clock_.Begin(phase, absl::StrCat(ProgressBar(done, absl::Now() - begin), detail));
        if (phase != "prompts" || options_.out.empty()) return;
        // A run of an hour leaves its results so far. What fails here fails again at the end.
        const Report before = report_;
        AddQuality(so_far, &report_);
        WriteFolder().IgnoreError();
        report_ = before;
      };
      SLUICE_ASSIGN_OR_RETURN(const QualityResult found,
                              MeasureQuality(world_, policies_, *texts_, quality, progress));
      clock_.Pause();
      out_.Print(QualityText(found));
      AddQuality(found, &report_);
      if (!options_.out.empty()) SLUICE_RETURN_IF_ERROR(WriteFolder());
    }
    return absl::OkStatus();
  }

  absl::Status WriteFolder() {
    const std::filesystem::path folder = options_.out;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      return absl::UnavailableError(absl::StrCat("--out ", options_.out, ": ", error.message()));
    }
    SLUICE_RETURN_IF_ERROR(WriteReport(report_, folder / "policies.json"));
    for (; written_ < traces_.size(); ++written_) {
      const std::string name = absl::StrCat(
          "trace-",
          absl::StrReplaceAll(traces_[written_].name,
                              {{", ", "-"}, {" ", "-"}, {":", "-"}, {"=", "-"}, {"%", ""}}),
          options_.drifts.size() > 1 ? absl::StrCat("-drift-", drift_) : "", ".json");
      SLUICE_RETURN_IF_ERROR(WriteChromeTrace({traces_[written_]}, folder / name));
      traces_[written_] = StepTrace();
    }
    return absl::OkStatus();
  }

  void TellFolder() const {
    out_.Print(absl::StrCat("\nwritten: ", options_.out,
                            "/policies.json; traces beside it open in ui.perfetto.dev; "
                            "tools/sluice plot-policies --run ",
                            options_.out, " draws it\n"));
  }

  const PoliciesBenchOptions options_;
  const std::vector<std::string> policies_;
  const int threads_;
  const Output out_;
  Report report_;
  std::unique_ptr<BenchDevice> bench_device_;
  RunClock clock_;
  LatentReport latent_report_{options_, out_, &report_, &clock_};
  TrafficReport traffic_report_{options_, out_, &report_, &clock_};
  double drift_ = 0;
  std::unique_ptr<Model> model_;
  std::optional<Model::Options> twin_;  // Set if a twin computes the contexts.
  std::unique_ptr<BenchTiers> tiers_;
  DeviceRates rates_;
  std::optional<QualityTexts> texts_;
  PolicyWorld world_;
  size_t next_json_ = 0;           // The first of details["runs"] without its floor.
  std::vector<StepTrace> traces_;  // Traces to write; empty without --out.
  size_t written_ = 0;             // Traces already written.
};

}  // namespace

int RunPoliciesBench(const Invocation& invocation) {
  PoliciesBenchOptions o;
  std::vector<std::string> policies;
  if (const auto status = ReadPoliciesOptions(invocation, &o, &policies)) return *status;
  Report report = NewReport("policies", invocation);
  report.shape = {{"policies", o.policies},
                  {"workload", WorkloadName(o, o.drifts.front())},
                  {"contexts", absl::StrJoin(o.contexts, ",")},
                  {"hbm", o.hbm_bytes},
                  {"dram", o.dram_bytes},
                  {"budget_tokens", o.quality ? "shares of the context" : absl::StrCat(o.budget)},
                  {"dense_layers", absl::StrCat(o.dense_layers)},
                  {"block_tokens", absl::StrCat(o.block_tokens)},
                  {"workers", absl::StrCat(o.workers)}};
  // The report does not contain the policies' log lines.
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  const absl::StatusOr<int> status = PoliciesBench(o, std::move(policies), std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
