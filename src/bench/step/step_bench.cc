// sluice-bench step: times decode steps of a whole model beside the floor that memory sets, and a
// prefill beside the rate of its matrix products; or the engine with drafts beside the engine
// without (speculation_run.h).
//
// The floor of a step is the weights once and every sequence's cache once, over the rate at which
// the device reads that many bytes again and again (on the CPU as many threads do), measured
// between the steps. So the weights that the CPU's L3 keeps from one step to the next are also kept
// for the floor; on a GPU nothing is kept. Beside it stands the floor over 512 MiB, of which an L3
// keeps little. Contexts are not computed: their caches hold random values (random_caches.h). Steps
// are launched as the engine launches them, one ahead of the results. Then the engine itself runs
// the same batch, handed over by transfers: the host's share of a step is the part that is not
// kernels by the device's own clock.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/engine_run.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/operators/timed_operator.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/step/speculation_report.h"
#include "src/bench/step/speculation_run.h"
#include "src/bench/trace/chrome_trace.h"
#include "src/bench/trace/trace_summary.h"
#include "src/bench/workload/random_caches.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/kernel_set.h"
#include "src/engine/batch_state.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/model/policy_model.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Times decode steps of a model without gRPC, for every batch and context, and a prefill.

The columns are the median time of a step and its 10th-90th percentiles, tokens/s, the floor (weights and
caches once, at the rate at which the device reads as many bytes over and over), the share of the floor that
is reached, and the same against a rate over 512 MiB, of which a CPU's L3 keeps little: that share can exceed
100 %. The last columns are a step of the real engine over the same batch, and the host's share of it: the
part that is not kernels.

With --speculation-tokens N it compares the engine with itself instead. It decodes the sequences without
drafts, greedily, and then again from the same caches with N drafts a step, each of which is the token that
the first run chose with probability --acceptance and a wrong one otherwise: drafts by stated probability, not
by a model. The columns are the tokens/s of all sequences in both runs and their ratio, the time of a step
in both, the tokens that a step with drafts gave a sequence and what the probability gives, and the share of
drafts accepted, of those whose earlier drafts in the step were. The exit status is 1 if any token differs.
)";
constexpr char kExamples[] =
    R"(  sluice-bench step --model models/smollm2-135m-instruct --batches 1 --contexts 64,2048
  sluice-bench step --model models/smollm2-135m-instruct --prefill 0 --json step.json
  sluice-bench step --model models/smollm2-135m-instruct --batches 8 --contexts 512 --trace step-trace.json
  sluice-bench step --device cuda --model configs/models/qwen3-8b --dummy --batches 1,8,32 --contexts 8192
  sluice-bench step --model models/smollm2-135m-instruct --dummy --batches 1,8 --contexts 512 \
      --speculation-tokens 3 --acceptance 0.7
)";

constexpr size_t kColdBytes = size_t{512} << 20;
constexpr int kRounds = 4;  // Rounds of a probe and steps, in turn.
constexpr double kProbeSeconds = 0.15;
constexpr int64_t kTraceSteps = 8;

struct Options {
  std::string device = "cpu", model, kernels = "auto", context_fill = "random", json, trace;
  std::string kv_dtype = "bf16";
  bool dummy = false, no_engine = false;
  int64_t threads = 0, steps = 40, prefill = 1024, chunk = 512, trace_steps = 0;
  int64_t speculation_tokens = 0;
  bool draft_layer = false;
  double acceptance = 0.7;
  std::vector<int64_t> contexts = {64, 512, 2048}, batches = {1, 8, 32};
};

class StepBench {
 public:
  StepBench(const Options& o, Report report)
      : options_(o),
        threads_(o.threads > 0 ? static_cast<int>(o.threads) : DefaultThreads()),
        out_(o.json),
        report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    std::vector<std::pair<std::string, std::string>> shape = {{"model", model_->config().name},
                                                              {"device", device_->name()}};
    for (auto& entry : bench_device_->Shape()) shape.push_back(std::move(entry));
    shape.emplace_back("weight_bytes", absl::StrCat(weight_bytes()));
    report_.shape.insert(report_.shape.begin(), shape.begin(), shape.end());
    out_.Print(Preamble(report_));
    if (options_.speculation_tokens > 0) return RunSpeculations();
    if (!options_.batches.empty()) {
      out_.Print(absl::StrFormat("\n%6s %8s %12s %17s %10s %10s %9s %9s %10s %9s\n", "batch",
                                 "context", "ms a step", "10th-90th", "tokens/s", "floor ms",
                                 "of floor", "512 MiB", "engine ms", "host"));
    }
    for (const int64_t batch : options_.batches) {
      for (const int64_t context : options_.contexts) {
        SLUICE_RETURN_IF_ERROR(RunSteps(static_cast<int>(batch), static_cast<int>(context)));
      }
    }
    if (options_.prefill > 0) SLUICE_RETURN_IF_ERROR(RunPrefill());
    if (!options_.trace.empty()) {
      SLUICE_RETURN_IF_ERROR(WriteChromeTrace(traces_, options_.trace));
      out_.Print(absl::StrCat("\nwritten: ", options_.trace, " (ui.perfetto.dev opens it)\n"));
    }
    return out_.Finish(report_);
  }

 private:
  static constexpr int kWarmUp = 2;

  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options_.model));
    if (options_.speculation_tokens == 0) {
      SLUICE_RETURN_IF_ERROR(CheckKeysAndValues(config, "the bench of steps without drafts"));
    }
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, options_.kernels, threads_}));
    device_ = &bench_device_->device();
    max_batch_ =
        static_cast<int>(*std::max_element(options_.batches.begin(), options_.batches.end()));
    const int64_t more = std::max<int64_t>(
        {options_.steps + (kWarmUp + 1) * kRounds, EngineTokens(EngineOptions(1, 1)),
         EngineTokens({1, 1, 1, static_cast<int>(options_.trace_steps)})});
    const int64_t longest =
        *std::max_element(options_.contexts.begin(), options_.contexts.end()) + more;
    max_context_ = static_cast<int>(std::max(longest, options_.prefill + 1));
    Model::Options model;
    model.directory = options_.model;
    model.load_format = options_.dummy ? "dummy" : "auto";
    model.max_context = max_context_;
    model.sequence_rows = static_cast<int>(1 + options_.speculation_tokens);
    model.max_logits = max_batch_ * model.sequence_rows;
    model.max_rows = std::max(model.max_logits + 1, static_cast<int>(options_.chunk));
    if (options_.kv_dtype == "fp8") model.kv_dtype = DType::kFloat8E4M3;
    if (options_.draft_layer) model.draft_layer = Model::Options::DraftLayer::kRequired;
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, device_));
    const int64_t bytes =
        (model_->cache_layout().BytesFor(max_context_) + 4096) * max_batch_ + 8192;
    SLUICE_ASSIGN_OR_RETURN(Buffer caches, device_->Allocate(MemoryKind::kDevice,
                                                             static_cast<size_t>(bytes), "caches"));
    SLUICE_ASSIGN_OR_RETURN(pool_,
                            PagePool::Create("hbm", model_->cache_layout(), std::move(caches)));
    PolicyOptions policy = PolicyOver(device_, pool_.get(), max_batch_, max_context_);
    policy.rows_per_sequence = static_cast<int>(1 + options_.speculation_tokens);
    DescribeModel(*model_, &policy);
    SLUICE_ASSIGN_OR_RETURN(policy_, NewFullPolicy(policy));
    SLUICE_ASSIGN_OR_RETURN(batch_,
                            BatchState::Create({max_batch_, max_context_}, device_, *model_));
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
    SLUICE_RETURN_IF_ERROR(batch_->RecordPrograms(*stream_, *model_, *policy_));
    // With drafts the engine fills the contexts.
    const bool fill = random_context() && options_.speculation_tokens == 0;
    return fill ? FillWithRandomValues(*device_, *pool_) : absl::OkStatus();
  }

  bool random_context() const { return options_.context_fill == "random"; }

  // Returns the bytes of weights that a step reads: all except an embedding that is not also the
  // head.
  int64_t weight_bytes() const {
    const ModelConfig& c = model_->config();
    const int64_t table = c.tie_word_embeddings ? 0 : int64_t{c.vocab_size} * c.hidden_size * 2;
    return model_->weight_bytes() - table;
  }
  double StepBytes(int batch, int context) const {
    const CacheKind& kv = model_->cache_layout().kinds[0];
    return static_cast<double>(weight_bytes()) +
           static_cast<double>(model_->cache_layout().layers) * kv.heads *
               static_cast<double>(kv.bytes_per_token) * context * batch;
  }

  absl::Status Join(int slot, int tokens) {
    std::unique_ptr<SequenceCache> none;
    if (!policy_->Admit(slot, 0, max_context_, Promise::kFirm, none)) {
      return absl::ResourceExhaustedError("the caches do not fit");
    }
    policy_->WarmEvent(slot).Wait();
    policy_->Grow(slot, max_context_);
    SamplingParams greedy;
    greedy.temperature = 0;
    batch_->Join(*stream_, slot, std::vector<int32_t>(static_cast<size_t>(tokens), 1), greedy, 1,
                 tokens, {});
    return absl::OkStatus();
  }

  // Launches `steps` steps as the engine does, and appends the times between their ends to
  // `seconds`.
  void Steps(StepPlan& plan, int64_t steps, std::vector<double>* seconds) {
    absl::Time last = absl::Now();
    for (int64_t step = 0; step < steps + kWarmUp; ++step) {
      batch_->Launch(*stream_, static_cast<int>(step % 2), plan, *model_, *policy_);
      for (PlanRow& row : plan.rows) row.first_position += row.count;
      if (step == 0) continue;
      batch_->event(static_cast<int>((step - 1) % 2)).Wait();
      const absl::Time now = absl::Now();
      if (step >= kWarmUp) seconds->push_back(absl::ToDoubleSeconds(now - last));
      last = now;
    }
    for (int b = 0; b < 2; ++b) batch_->event(b).Wait();
  }

  // A step with drafts gives several tokens of a sequence, by which the engine's windows count.
  EngineRunOptions EngineOptions(int batch, int context) const {
    const int64_t steps = std::max<int64_t>(options_.steps / kRounds, 1);
    return {batch, context, kRounds, static_cast<int>(steps * (1 + options_.speculation_tokens)),
            random_context()};
  }

  // Adds the engine's measurements of the same steps to the figure, and returns the end of its
  // line.
  absl::StatusOr<std::string> RunTheEngine(int batch, int context, Figure* figure) {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<EngineWindow> windows,
                            RunEngine(EngineOptions(batch, context), max_batch_, device_,
                                      model_.get(), pool_.get(), policy_.get()));
    std::vector<double> step, share, busy;
    for (const EngineWindow& w : windows) {
      step.push_back(w.step_seconds);
      share.push_back(1 - w.kernels_seconds / w.step_seconds);
      busy.push_back(w.turn_seconds / w.step_seconds);
    }
    const Timing t = TimingOf(share);
    figure->more.insert(figure->more.end(), {{"engine_step_seconds", TimingOf(step).median},
                                             {"host_share", t.median},
                                             {"host_share_low", t.low},
                                             {"host_share_high", t.high},
                                             {"engine_thread_share", TimingOf(busy).median}});
    return absl::StrFormat("%10.2f %8.1f%% (%.1f-%.1f)\n", TimingOf(step).median * 1e3,
                           100 * t.median, 100 * t.low, 100 * t.high);
  }

  absl::Status RunSteps(int batch, int context) {
    StepPlan plan;
    for (int slot = 0; slot < batch; ++slot) {
      SLUICE_RETURN_IF_ERROR(Join(slot, context));
      plan.rows.push_back({slot, context - 1, 1, true});
    }
    plan.row_count = plan.decode_rows = plan.sample_count = batch;
    const double bytes = StepBytes(batch, context);
    std::vector<double> seconds, warm, cold;
    for (int round = 0; round < kRounds; ++round) {
      SLUICE_ASSIGN_OR_RETURN(cold.emplace_back(), bench_device_->ReadRate(kColdBytes));
      SLUICE_ASSIGN_OR_RETURN(warm.emplace_back(),
                              bench_device_->ReadRate(static_cast<size_t>(bytes)));
      Steps(plan, std::max<int64_t>(options_.steps / kRounds, 1), &seconds);
      SLUICE_RETURN_IF_ERROR(device_->Health());
    }
    for (int slot = 0; slot < batch; ++slot) policy_->Release(slot);
    Figure f = SecondsFigure(absl::StrFormat("step, batch %d, context %d", batch, context),
                             TimingOf(seconds));
    const double warm_rate = TimingOf(warm).median, cold_rate = TimingOf(cold).median;
    f.more = {{"tokens_per_second", batch / f.median},
              {"bytes", bytes},
              {"same_bytes_per_second", warm_rate},
              {"read_bytes_per_second", cold_rate},
              {"floor_seconds", bytes / warm_rate},
              {"of_floor", bytes / warm_rate / f.median},
              {"of_512_mib_floor", bytes / cold_rate / f.median}};
    out_.Print(absl::StrFormat("%6d %8d %12.2f %8.2f-%8.2f %10.1f %10.2f %8.0f%% %8.0f%%", batch,
                               context, f.median * 1e3, f.low * 1e3, f.high * 1e3, batch / f.median,
                               bytes / warm_rate * 1e3, 100 * bytes / warm_rate / f.median,
                               100 * bytes / cold_rate / f.median));
    std::string rest = "\n";
    if (!options_.no_engine) {
      SLUICE_ASSIGN_OR_RETURN(rest, RunTheEngine(batch, context, &f));
    }
    out_.Print(rest);
    if (options_.trace_steps > 0) SLUICE_RETURN_IF_ERROR(Trace(batch, context));
    report_.figures.push_back(std::move(f));
    return absl::OkStatus();
  }

  SpeculationOptions Speculation(int64_t batch, int64_t context) const {
    return {EngineOptions(static_cast<int>(batch), static_cast<int>(context)),
            static_cast<int>(options_.speculation_tokens), options_.acceptance,
            options_.draft_layer};
  }

  absl::StatusOr<int> RunSpeculations() {
    out_.Print(SpeculationHeader(Speculation(1, 1)));
    for (const int64_t batch : options_.batches) {
      for (const int64_t context : options_.contexts) {
        const SpeculationOptions run = Speculation(batch, context);
        SLUICE_ASSIGN_OR_RETURN(
            const SpeculationResult result,
            RunSpeculation(run, max_batch_, device_, model_.get(), pool_.get(), policy_.get()));
        out_.Print(SpeculationLine(run, result));
        for (Figure& figure : SpeculationFigures(run, result)) {
          report_.figures.push_back(std::move(figure));
        }
      }
    }
    out_.Print("all tokens with drafts are those without\n");
    return out_.Finish(report_);
  }

  // Runs the same batch once more in the engine, under a trace.
  absl::Status Trace(int batch, int context) {
    EngineRunOptions run = EngineOptions(batch, context);
    run.windows = 1;
    run.steps = static_cast<int>(options_.trace_steps);
    SLUICE_ASSIGN_OR_RETURN(StepTrace trace, TraceSteps(run, max_batch_, device_, model_.get(),
                                                        pool_.get(), policy_.get()));
    const TraceSummary summary = Summarize(trace);
    out_.Print(ToText(trace, summary));
    report_.details["traces"].push_back(ToJson(trace, summary));
    traces_.push_back(std::move(trace));
    return absl::OkStatus();
  }

  // Returns the multiplications and additions of the products and of causal attention alone, which
  // are nearly all there are. The measured time includes everything.
  double PrefillFlops(int64_t tokens) const {
    const ModelConfig& c = model_->config();
    const double width = double(c.heads + 2 * c.kv_heads) * c.head_dim;
    const double layer = width * c.hidden_size + double(c.heads) * c.head_dim * c.hidden_size +
                         3.0 * c.hidden_size * c.intermediate_size;
    const double pairs = 0.5 * double(tokens) * double(tokens + 1);
    return c.layers * (2 * layer * double(tokens) + 4 * pairs * c.heads * c.head_dim);
  }

  // Measures the rates of the CPU's products alone at a prefill's shapes. Does nothing on other
  // devices.
  void MeasureProducts(TimedOperator* layer, std::vector<double>* rates) const {
    if (layer == nullptr) return;
    Crew crew(threads_);
    const Timing t = Measure(kProbeSeconds, [&] { layer->Run(crew); });
    rates->push_back(layer->flops() / t.median);
  }

  absl::Status RunPrefill() {
    std::vector<double> seconds, products;
    const kernels::KernelTable* const path =
        kernels::FindKernelTable(device_->kernels().name().c_str());
    const auto arena = path == nullptr ? nullptr : std::make_unique<OperandArena>(kColdBytes);
    const auto layer = path == nullptr ? nullptr
                                       : NewPrefillLayer(static_cast<int32_t>(options_.chunk),
                                                         false, *path, arena.get());
    for (int round = 0; round < kRounds; ++round) {
      MeasureProducts(layer.get(), &products);
      SLUICE_RETURN_IF_ERROR(Join(0, static_cast<int>(options_.prefill)));
      batch_->joined(0).Wait();
      const absl::Time start = absl::Now();
      for (int64_t at = 0, chunk = 0; at < options_.prefill; at += options_.chunk, ++chunk) {
        const auto count = static_cast<int32_t>(std::min(options_.chunk, options_.prefill - at));
        const bool last = at + count == options_.prefill;
        const StepPlan plan = {{{0, at, count, last}}, count, 0, last ? 1 : 0};
        batch_->event(static_cast<int>(chunk % 2)).Wait();
        batch_->Launch(*stream_, static_cast<int>(chunk % 2), plan, *model_, *policy_);
      }
      for (int b = 0; b < 2; ++b) batch_->event(b).Wait();
      SLUICE_RETURN_IF_ERROR(device_->Health());
      seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
      policy_->Release(0);
    }
    Figure f = SecondsFigure(
        absl::StrFormat("prefill, %d tokens in chunks of %d", options_.prefill, options_.chunk),
        TimingOf(seconds));
    const double flops = PrefillFlops(options_.prefill), rate = flops / f.median;
    f.more = {{"flops", flops},
              {"flops_per_second", rate},
              {"tokens_per_second", static_cast<double>(options_.prefill) / f.median}};
    out_.Print(absl::StrFormat(
        "\n%s: %.1f ms (%.1f-%.1f), %.0f tokens/s, %.0f GFLOP/s of products and attention", f.name,
        f.median * 1e3, f.low * 1e3, f.high * 1e3, static_cast<double>(options_.prefill) / f.median,
        rate * 1e-9));
    if (!products.empty()) {
      const double product_rate = TimingOf(products).median;
      f.more.emplace_back("products_flops_per_second", product_rate);
      f.more.emplace_back("of_products_rate", rate / product_rate);
      out_.Print(absl::StrFormat(
          ": %.0f %% of the\n%.0f GFLOP/s that its products reach alone at the same shapes",
          100 * rate / product_rate, product_rate * 1e-9));
    }
    out_.Print("\n");
    report_.figures.push_back(std::move(f));
    return absl::OkStatus();
  }

  const Options options_;
  const int threads_;
  const Output out_;
  Report report_;
  int max_batch_ = 0, max_context_ = 0;
  std::unique_ptr<BenchDevice> bench_device_;
  Device* device_ = nullptr;  // Owned by bench_device_.
  std::unique_ptr<Model> model_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<FullPolicy> policy_;
  std::unique_ptr<BatchState> batch_;
  std::unique_ptr<Stream> stream_;
  std::vector<StepTrace> traces_;
};

}  // namespace

int RunStepBench(const Invocation& invocation) {
  Options o;
  Flags flags("sluice-bench step", kAbout, kExamples);
  flags.Choice("device", {"cpu", "cuda"}, "device that the model runs on", &o.device);
  flags.Text("model", "DIR", "Hugging Face directory", &o.model);
  flags.Switch("dummy", "use formula weights: only config.json is read", &o.dummy);
  flags.Text("kernels", "NAME", "CPU kernels, as for sluice-server", &o.kernels);
  flags.Integer("threads", "compute threads; 0: the server's choice", 0, 1024, &o.threads);
  flags.Integers("batches", "numbers of sequences in a step", 1, 4096, &o.batches);
  flags.Integers("contexts", "context lengths of the sequences", 1, 1 << 20, &o.contexts);
  flags.Choice("context-fill", {"random", "zeros"},
               "content of the contexts' caches, which no prefill computes", &o.context_fill);
  flags.Choice("kv-dtype", {"bf16", "fp8"},
               "form of the caches; fp8 is for latent caches, with zeros in the contexts",
               &o.kv_dtype);
  flags.Integer("steps", "measured steps of each figure", 4, 1'000'000, &o.steps);
  flags.Integer("speculation-tokens",
                "compare the engine without drafts and with so many in a step; 0: time steps", 0,
                kernels::kMaxNewTokens - 1, &o.speculation_tokens);
  flags.Number("acceptance", "probability of each draft to be right", 0, 1, &o.acceptance);
  flags.Switch(
      "draft-layer",
      "run the model's next-token layer too, as --speculation mtp does, without its drafts",
      &o.draft_layer);
  flags.Switch("no-engine", "do not run the engine", &o.no_engine);
  flags.Integer("trace-steps",
                "trace so many steps of the engine for each figure: kernels, copies, gaps, host", 0,
                10'000, &o.trace_steps);
  flags.Text("trace", "FILE",
             "write the traces for ui.perfetto.dev; 8 steps unless --trace-steps is given",
             &o.trace);
  flags.Integer("prefill", "tokens of a prompt to compute; 0: none", 0, 1 << 20, &o.prefill);
  flags.Integer("chunk", "tokens of the prompt in one step", 1, 65536, &o.chunk);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o.json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  if (o.model.empty()) return Usage("--model is missing");
  if (o.draft_layer &&
      (o.speculation_tokens < 1 || o.speculation_tokens > kernels::kMaxDeviceDrafts)) {
    return Usage(absl::StrCat("--draft-layer needs --speculation-tokens of 1 to ",
                              kernels::kMaxDeviceDrafts));
  }
  if (o.kv_dtype == "fp8" && o.context_fill != "zeros") {
    return Usage("--kv-dtype fp8 needs --context-fill zeros: random bytes are no packed entries");
  }
  if (!o.trace.empty() && o.trace_steps == 0) o.trace_steps = kTraceSteps;
  if (o.prefill > 0) o.chunk = std::min(o.chunk, o.prefill);
  Report report = NewReport("step", invocation);
  report.shape = {{"batches", absl::StrJoin(o.batches, ",")},
                  {"contexts", absl::StrJoin(o.contexts, ",")},
                  {"context_fill", o.context_fill == "random" ? "random bf16 in [-1, 1)" : "zeros"},
                  {"kv_dtype", o.kv_dtype},
                  {"steps", absl::StrCat(o.steps)}};
  if (o.speculation_tokens > 0) {
    SpeculationOptions drafts;
    drafts.draft_tokens = static_cast<int>(o.speculation_tokens);
    drafts.probability = o.acceptance;
    drafts.draft_layer = o.draft_layer;
    report.shape.emplace_back("drafts", DraftsInWords(drafts));
  }
  const absl::StatusOr<int> status = StepBench(o, std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
