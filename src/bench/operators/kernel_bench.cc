// sluice-bench kernels: times the CPU kernels against the machine's limits, and the operators of
// sparse policies on a device (policy_operator_bench.cc).
//
// The floor of an operator is its bytes over the read bandwidth that as many threads reached a
// moment before. Arithmetic has no floor here: many rows have their rate printed as it is, and the
// rate of a prefill stands beside the rate of its products alone.
#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "src/bench/operators/kernel_bench.h"
#include "src/bench/operators/timed_operator.h"
#include "src/bench/report/subcommand.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice::bench {
namespace {

using kernels::KernelTable;

constexpr char kAbout[] =
    R"(Checks every CPU kernel of the shared case table against the float64 reference, then times it.

The columns are the median time and its 10th-90th percentiles, GB/s of weights or caches, GFLOP/s, and the
share of the floor: (bytes / read bandwidth) / time. The bandwidth is measured before each case, with the same
threads. Every wrong result is named, and then the exit status is 1.

--only policies times the operators that sparse policies add to a step, for one layer of Qwen3-14B's geometry,
as a step launches them on --device: the bytes in its memory and over the link, the floor that they set (bytes
over the rate at which the device reads as many bytes, or copies), and the share of the floor that is reached.
This mode does not check results.

--only step times the operators of a decode step of DeepSeek-V3.2's form (--model: a config.json), each at several
amounts of work, and writes what sluice-bench simulate reads. It does not check results either. --home-gib fills
so much pinned memory with hosts' caches, to find what an address translation costs a transfer; without it the
constant of an H200 is written. The other constants that this command cannot measure are an H200's too.
)";

constexpr char kExamples[] =
    R"(  sluice-bench kernels --only attention --threads 1,2
  sluice-bench kernels --path amx --json kernels.json
  sluice-bench kernels --device cuda --only policies --rows 10 --context 65536
  sluice-bench kernels --device cuda --only step --model configs/models/deepseek-v3.2-ep32 --home-gib 64 \
      --json operators.json
)";

// Shorter figures use the bandwidth measured at the start.
constexpr double kSecondsWorthAProbe = 0.05;
constexpr int32_t kPrefillTokens = 1024;

struct Options {
  std::vector<int64_t> threads = {DefaultThreads()};
  std::string path = "best";
  std::string only = "all";
  double seconds = 0.3;
  int64_t arena_mib = 512;
  std::string device = "cpu", match;
  int64_t rows = 10, context = 65536, budget = 2048;
  // With --only step.
  std::string model;
  std::vector<int64_t> step_rows = {1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512};
  std::vector<int64_t> contexts = {32768, 131072}, misses = {0, 16, 64, 256, 605, 2048};
  int64_t sequences = 64, home_gib = 0;
  std::string json;
};

class KernelBench {
 public:
  KernelBench(const Options& options, Report report)
      : options_(options),
        out_(options.json),
        report_(std::move(report)),
        arena_(static_cast<size_t>(options.arena_mib) << 20) {}

  int Run() {
    out_.Print(Preamble(report_));
    for (const int64_t threads : options_.threads) {
      Crew crew(static_cast<int>(threads));
      crew_ = &crew;
      ProbeFor(std::min(1.0, 3 * options_.seconds));
      AddBandwidth();
      for (const KernelTable* path : Paths()) RunPath(*path);
    }
    const int status = out_.Finish(report_);
    for (const std::string& what : wrong_) {
      std::fprintf(stderr, "sluice-bench: wrong: %s\n", what.c_str());
    }
    return wrong_.empty() ? status : 1;
  }

 private:
  std::vector<const KernelTable*> Paths() const {
    std::vector<const KernelTable*> paths = kernels::AvailableKernelTables();
    paths.erase(paths.begin());  // The reference.
    if (options_.path == "all") return paths;
    if (options_.path == "best") return {paths.back()};
    return {kernels::FindKernelTable(options_.path.c_str())};
  }
  bool Wanted(const char* what) const { return options_.only == "all" || options_.only == what; }

  void RunPath(const KernelTable& path) {
    if (Wanted("linear")) {
      for (const auto& c : kernels::TimedLinearCases()) RunOne(path, *NewLinear(c, path, &arena_));
    }
    if (Wanted("attention")) {
      for (const auto& c : kernels::TimedDecodeCases()) {
        RunOne(path, *NewAttention(c, path, &arena_));
      }
    }
    if (Wanted("sparse") && path.sparse_attention != nullptr) {
      for (const auto& c : kernels::TimedSparseCases()) {
        RunOne(path, *NewSparseAttention(c, path, &arena_));
      }
    }
    if (Wanted("levels") && path.level_scores != nullptr) {
      for (const auto& c : kernels::TimedLevelsCases()) RunOne(path, *NewLevelScores(c, path));
    }
    if (Wanted("latent") && path.sparse_mla != nullptr) {
      for (const auto& make : LatentOperators(path, &arena_)) RunOne(path, *make());
    }
    if (Wanted("attention") || Wanted("prefill")) {
      RunOne(path, *NewAttention(kernels::PrefillCase(kPrefillTokens), path, &arena_));
    }
    if (Wanted("sample")) {
      for (const auto& c : kernels::TimedSampleCases()) {
        RunOne(path, *NewSample(c, path, crew_->count()));
      }
    }
    if (Wanted("prefill")) RunPrefill(path);
  }

  void ProbeFor(double seconds) {
    probe_ = MeasureRead(*crew_, arena_.buffer(), arena_.buffer().bytes(), seconds);
  }
  double arena_bytes() const { return static_cast<double>(arena_.buffer().bytes()); }
  double bandwidth() const { return arena_bytes() / probe_.median; }

  void AddBandwidth() {
    const auto rate = [&](double seconds) { return arena_bytes() / seconds; };
    Figure f;
    f.name = absl::StrCat("read bandwidth, ", crew_->count(), " threads");
    f.unit = "B/s";
    f.median = rate(probe_.median);
    f.low = rate(probe_.high);
    f.high = rate(probe_.low);
    f.samples = probe_.samples;
    out_.Print(
        absl::StrFormat("\n%d threads: reads %.1f GB/s (%.1f-%.1f)\n%-52s %19s %13s %7s %8s %9s\n",
                        crew_->count(), f.median * 1e-9, f.low * 1e-9, f.high * 1e-9, "operator",
                        "us", "10th-90th", "GB/s", "GFLOP/s", "of floor"));
    report_.figures.push_back(std::move(f));
  }

  // Returns the median's GFLOP/s.
  double RunOne(const KernelTable& path, TimedOperator& op) {
    const std::string name = absl::StrCat(path.name, ", ", op.name());
    const double error = op.Error(*crew_);
    if (!(error <= op.allowed_error())) {
      wrong_.push_back(absl::StrFormat("%s: relative error %.2e, at most %.2e is right", name,
                                       error, op.allowed_error()));
    }
    if (options_.seconds >= kSecondsWorthAProbe) ProbeFor(std::min(options_.seconds, 0.2));
    const Timing t = Measure(options_.seconds, [&] { op.Run(*crew_); });
    const double of_floor = op.bytes() / bandwidth() / t.median;
    Figure f = SecondsFigure(absl::StrCat(name, ", ", crew_->count(), " threads"), t);
    f.more = {{"bytes", op.bytes()},
              {"bytes_per_second", op.bytes() / t.median},
              {"flops", op.flops()},
              {"flops_per_second", op.flops() / t.median},
              {"read_bytes_per_second", bandwidth()},
              {"of_floor", of_floor},
              {"relative_error", error}};
    report_.figures.push_back(std::move(f));
    out_.Print(absl::StrFormat(
        "%-52s %9.1f %9.1f-%-9.1f %7.1f %8.1f %8.0f%%\n", name, t.median * 1e6, t.low * 1e6,
        t.high * 1e6, op.bytes() / t.median * 1e-9, op.flops() / t.median * 1e-9, of_floor * 100));
    return op.flops() / t.median * 1e-9;
  }

  void RunPrefill(const KernelTable& path) {
    const double products = RunOne(path, *NewPrefillLayer(kPrefillTokens, false, path, &arena_));
    const double all = RunOne(path, *NewPrefillLayer(kPrefillTokens, true, path, &arena_));
    report_.figures.back().more.emplace_back("share_of_products_rate", all / products);
    out_.Print(absl::StrFormat("%-52s %.0f %% of the rate of its products alone\n",
                               absl::StrCat(path.name, ", prefill with attention reaches"),
                               100 * all / products));
  }

  const Options options_;
  const Output out_;
  Report report_;
  OperandArena arena_;
  Crew* crew_ = nullptr;
  Timing probe_;
  std::vector<std::string> wrong_;
};

int RunOnDevice(const Options& o, Report report) {
  if (o.budget >= o.context) return Usage("--budget must be less than --context");
  PolicyBenchOptions options;
  options.device = o.device;
  options.threads = static_cast<int>(o.threads[0]);
  options.shape.rows = static_cast<int32_t>(o.rows);
  options.shape.context =
      static_cast<int32_t>(o.context / options.shape.block_tokens) * options.shape.block_tokens;
  options.shape.budget_tokens =
      static_cast<int32_t>(o.budget / options.shape.block_tokens) * options.shape.block_tokens;
  options.seconds = o.seconds;
  options.match = o.match;
  options.json = o.json;
  report.shape = {{"device", o.device},
                  {"rows", absl::StrCat(o.rows)},
                  {"context", absl::StrCat(options.shape.context)},
                  {"budget", absl::StrCat(options.shape.budget_tokens)},
                  {"heads", absl::StrCat(options.shape.heads)},
                  {"kv_heads", absl::StrCat(options.shape.kv_heads)},
                  {"head_dim", absl::StrCat(options.shape.head_dim)},
                  {"block_tokens", absl::StrCat(options.shape.block_tokens)}};
  return RunPolicyOperatorBench(options, std::move(report));
}

int RunSteps(const Options& o, Report report) {
  if (o.model.empty()) return Usage("--only step needs --model");
  StepPointOptions options;
  options.device = o.device;
  options.model = o.model;
  options.match = o.match;
  options.json = o.json;
  options.threads = static_cast<int>(o.threads[0]);
  options.seconds = o.seconds;
  options.rows = o.step_rows;
  options.contexts = o.contexts;
  options.misses = o.misses;
  options.sequences = o.sequences;
  options.home_gib = static_cast<double>(o.home_gib);
  report.shape = {{"device", o.device},
                  {"model", o.model},
                  {"rows", absl::StrJoin(o.step_rows, ",")},
                  {"contexts", absl::StrJoin(o.contexts, ",")},
                  {"misses", absl::StrJoin(o.misses, ",")},
                  {"sequences", absl::StrCat(o.sequences)},
                  {"home_gib", absl::StrCat(o.home_gib)}};
  return RunStepPointBench(options, std::move(report));
}

}  // namespace

int RunKernelBench(const Invocation& invocation) {
  Options o;
  std::vector<std::string> paths = {"best", "all"};
  for (const KernelTable* table : kernels::AvailableKernelTables()) paths.push_back(table->name);
  paths.erase(paths.begin() + 2);  // The reference.
  Flags flags("sluice-bench kernels", kAbout, kExamples);
  flags.Integers("threads", "threads that share an operator; several values give a table each", 1,
                 1024, &o.threads);
  flags.Choice("path", paths, "instruction set, one that this processor has", &o.path);
  flags.Choice("only",
               {"all", "linear", "attention", "sparse", "levels", "latent", "sample", "prefill",
                "policies", "step"},
               "operators to run", &o.only);
  flags.Choice("device", {"cpu", "cuda"}, "device that --only policies and --only step run on",
               &o.device);
  flags.Text("match", "TEXT",
             "with --only policies or step: run operators whose names contain this", &o.match);
  flags.Integer("rows", "with --only policies: decode rows", 1, 1024, &o.rows);
  flags.Integer("context", "with --only policies: tokens of each row's sequence", 512, 1 << 20,
                &o.context);
  flags.Integer("budget", "with --only policies: tokens that a row attends to", 128, 1 << 16,
                &o.budget);
  flags.Text("model", "DIR", "with --only step: directory with config.json", &o.model);
  flags.Integers("step-rows", "with --only step: decode rows", 1, 4096, &o.step_rows);
  flags.Integers("contexts", "with --only step: tokens of a sequence", 64, 1 << 20, &o.contexts);
  flags.Integers("misses", "with --only step: entries that a sequence misses", 0, 65536, &o.misses);
  flags.Integer("sequences", "with --only step: sequences whose misses are fetched", 1, 1024,
                &o.sequences);
  flags.Integer("home-gib", "with --only step: pinned memory beyond address translation", 0, 4096,
                &o.home_gib);
  flags.Seconds("seconds", "time spent on each figure", 60, &o.seconds);
  flags.Integer("arena-mib",
                "memory that weights and caches cycle through, and that the bandwidth is measured "
                "with; at least the size of 16 experts",
                256, 65536, &o.arena_mib);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o.json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  Report report = NewReport("kernels", invocation);
  report.shape = {{"threads", absl::StrJoin(o.threads, ",")},
                  {"path", o.path},
                  {"only", o.only},
                  {"arena_mib", absl::StrCat(o.arena_mib)}};
  if (o.only == "step") return RunSteps(o, std::move(report));
  if (o.only != "policies") {
    if (o.device == "cpu") return KernelBench(o, std::move(report)).Run();
    return Usage(
        "--device cuda needs --only policies or step; tests/bench/cuda times the other operators");
  }
  return RunOnDevice(o, std::move(report));
}

}  // namespace sluice::bench
