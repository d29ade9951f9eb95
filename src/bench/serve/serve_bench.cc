// sluice-bench serve: puts load on a running decode node and measures how the node bears it.
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/serve/load_driver.h"
#include "src/bench/serve/serve_stats.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Sends requests to a running sluice-server: each pushes its caches, random or recorded, so that no
prefill is needed, commits them and streams its tokens. Requests come at a rate (open loop: whatever becomes
of the others) or so many run at a time (closed loop). Sampling is greedy unless --temperature is set. The
model's end-of-text token does not end an output, so that the counts are exact.

Times count from the moment when a request was due, so a client or node that lags cannot hide it. Gaps are the
times between messages that carry tokens. A request is good if it is done, its first token came within
--slo-ttft, and the 99th percentile of its gaps is within --slo-itl. The exit status is 1 if a request failed
or a count is wrong; refusals (RESOURCE_EXHAUSTED) are figures, not failures.

With --phase, several stretches of load follow each other without a pause, each with its own figures:
  name=NAME, then rate=R (requests/s; 4x: 4 times what the phase before finished) or concurrency=N,
  then seconds=TIME or requests=N, and on-refusal=retry|count.
)";
constexpr char kExamples[] =
    R"(  sluice-bench serve --decode 127.0.0.1:7000 --requests 100 --concurrency 8 --prompt 512 --output 128
  sluice-bench serve --rate 3 --seconds 60s --prompt lognormal:400:0.8 --output lognormal:120:0.6 \
      --slo-ttft 500ms --slo-itl 100ms --json serve.json
  sluice-bench serve --phase name=full,concurrency=32,seconds=30s \
      --phase name=overload,rate=4x,seconds=3m,on-refusal=count --phase name=after,concurrency=32,seconds=30s
  sluice-bench serve --kv tests/fixtures/tiny-llama/golden.safetensors --case 1
)";

struct Options {
  LoadOptions load;
  ServiceLevel bounds;
  std::string prompt = "512", output;
  int64_t requests = 0, concurrency = 0, warmup = 0, channels = 2, kv_case = 0, seed = 1;
  double rate = 0, seconds = 0;
  std::string on_refusal = "retry", kv = "random", json;
};

// Rewrites the line in place; called only if standard error is a terminal.
void ShowProgress(const LoadProgress& p) {
  std::fprintf(
      stderr, "\r%6.1f s  %-10s %5zu running %7zu done %6zu refused %5zu failed %9.1f tokens/s ",
      p.seconds, p.phase.c_str(), p.running, p.done, p.refused, p.failed, p.tokens_per_second);
  std::fflush(stderr);
}

// Makes the phases that the flags describe, and fills in defaults.
absl::Status MakePhases(Options& o) {
  if (o.load.phases.empty()) {
    Phase phase;
    phase.name = "load";
    phase.rate = o.rate;
    phase.concurrency = o.concurrency == 0 && o.rate == 0 ? 8 : o.concurrency;
    phase.requests = o.requests == 0 && o.seconds == 0 ? 64 : o.requests;
    phase.seconds = o.seconds;
    phase.retry = o.on_refusal == "retry";
    if (const absl::Status status = phase.Check(); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("the load ", status.message()));
    }
    o.load.phases.push_back(phase);
  } else if (o.requests > 0 || o.seconds > 0 || o.rate > 0 || o.concurrency > 0) {
    return absl::InvalidArgumentError(
        "--phase describes the whole load: leave out --requests, --seconds, --rate and "
        "--concurrency");
  }
  if (o.warmup > 0) {
    Phase phase;
    phase.name = "warm-up";
    phase.requests = o.warmup;
    phase.concurrency = std::max<int64_t>(o.load.phases[0].concurrency, 1);
    o.load.phases.insert(o.load.phases.begin(), phase);
  }
  if (o.load.phases[0].rate_is_factor) {
    return absl::InvalidArgumentError(
        "the first phase has no phase before it: its rate must be a number of requests/s");
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Serve(Options o, Report report) {
  SLUICE_ASSIGN_OR_RETURN(const v1::GetModelResponse node, AskModel(o.load.address));
  std::unique_ptr<KvSource> kv;
  if (o.kv == "random") {
    SLUICE_ASSIGN_OR_RETURN(kv, NewRandomKv(node.model()));
  } else {
    SLUICE_ASSIGN_OR_RETURN(kv, NewRecordedKv(node.model(), o.kv, static_cast<int>(o.kv_case)));
    if (o.output.empty()) o.output = absl::StrCat(kv->Known().size());
  }
  if (o.output.empty()) o.output = "128";
  SLUICE_ASSIGN_OR_RETURN(o.load.output, Lengths::Parse(o.output));
  o.load.channels = static_cast<int>(o.channels);
  o.load.seed = static_cast<uint64_t>(o.seed);

  report.shape = {{"model", node.model().name()},
                  {"kernels", node.kernels()},
                  {"policy", node.policy()},
                  {"version", node.version()},
                  {"prompt", o.kv == "random" ? o.load.prompt.ToString() : "recorded"},
                  {"output", o.load.output.ToString()},
                  {"kv", o.kv},
                  {"seed", absl::StrCat(o.seed)}};
  for (const Phase& phase : o.load.phases) {
    report.shape.emplace_back(absl::StrCat("phase ", phase.name), phase.ToString());
  }
  const Output out(o.json);
  out.Print(Preamble(report));
  const bool terminal = isatty(STDERR_FILENO) == 1;
  const LoadResult result =
      RunLoad(o.load, node.model(), *kv,
              terminal ? ShowProgress : std::function<void(const LoadProgress&)>());
  if (terminal) std::fputs("\r\033[K", stderr);

  int64_t failed = 0;
  report.details["phases"] = nlohmann::json::array();
  for (size_t i = 0; i < o.load.phases.size(); ++i) {
    const PhaseStats stats = StatsOf(result, o.load.phases[i], i, o.bounds);
    failed += stats.failed;
    report.details["phases"].push_back(DetailsOf(stats, result, i));
    if (o.warmup > 0 && i == 0 && stats.failed == 0) continue;
    for (Figure& f : FiguresOf(stats)) report.figures.push_back(std::move(f));
    out.Print(TableOf(stats, o.bounds));
  }
  report.details["bucket_seconds"] = LoadResult::kBucketSeconds;
  report.details["tokens"] = result.tokens;
  report.details["decoding"] = DecodingOverTime(result);
  report.details["end_seconds"] = result.end;
  report.details["bytes_pushed"] = result.bytes_pushed;
  report.details["client_cpu_seconds"] = result.client_cpu_seconds;
  out.Print(absl::StrFormat(
      "\npushed %.1f MB; this client took %.1f s of processor time in %.1f s\n",
      static_cast<double>(result.bytes_pushed) * 1e-6, result.client_cpu_seconds, result.end));
  const int status = out.Finish(report);
  return failed > 0 ? 1 : status;
}

}  // namespace

int RunServeBench(const Invocation& invocation) {
  Options o;
  o.load.address = "127.0.0.1:7000";
  Flags flags("sluice-bench serve", kAbout, kExamples);
  flags.Text("decode", "ADDR", "host:port of the node", &o.load.address);
  flags.Integer("requests", "number of requests; without this and --seconds: 64", 0, 100'000'000,
                &o.requests);
  flags.Seconds("seconds", "time in which requests come; those running at its end are finished",
                86400, &o.seconds);
  flags.Number("rate", "requests/s, at random times (Poisson)", 0, 1e6, &o.rate);
  flags.Integer("concurrency", "requests at a time; without this and --rate: 8", 0, 100'000,
                &o.concurrency);
  flags.Repeated("phase", "KEY=VALUE,...", "a stretch of load (see above); may be repeated",
                 [&](const std::string& text) -> absl::Status {
                   SLUICE_ASSIGN_OR_RETURN(Phase phase, Phase::Parse(text));
                   for (const Phase& other : o.load.phases) {
                     if (other.name == phase.name) {
                       return absl::InvalidArgumentError("'" + phase.name + "' is already used");
                     }
                   }
                   o.load.phases.push_back(std::move(phase));
                   return absl::OkStatus();
                 });
  flags.Integer("warmup", "requests before the load, which do not count", 0, 100'000, &o.warmup);
  flags.Text("prompt", "LENGTH", "tokens: N, or lognormal:MEDIAN:SIGMA", &o.prompt);
  flags.Text("output", "LENGTH", "tokens, like --prompt (default 128, or as many as are recorded)",
             &o.output);
  flags.Text("kv", "random|FILE", "caches to push: random, or recorded (safetensors)", &o.kv);
  flags.Integer("case", "number of the prompt in a recorded file", 0, 1'000'000, &o.kv_case);
  flags.Number("temperature", "temperature; 0: greedy", 0, 100, &o.load.temperature);
  flags.Choice("on-refusal", {"retry", "count"},
               "retry: repeat after the time that RetryInfo names; count: end the request",
               &o.on_refusal);
  flags.Seconds("slo-ttft", "bound on the time to first token for goodput; 0: none", 3600,
                &o.bounds.ttft_seconds);
  flags.Seconds("slo-itl", "bound on gaps between tokens for goodput; 0: none", 3600,
                &o.bounds.itl_seconds);
  flags.Seconds("timeout", "deadline of every call", 86400, &o.load.timeout_seconds);
  flags.Integer("channels", "connections", 1, 64, &o.channels);
  flags.Integer("seed", "seed of lengths, arrivals and tokens in each phase", 0, INT64_MAX,
                &o.seed);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o.json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  const absl::StatusOr<Lengths> prompt = Lengths::Parse(o.prompt);
  if (!prompt.ok()) return Usage(absl::StrCat("--prompt ", prompt.status().message()));
  o.load.prompt = *prompt;
  if (!o.output.empty()) {
    const absl::StatusOr<Lengths> output = Lengths::Parse(o.output);
    if (!output.ok()) return Usage(absl::StrCat("--output ", output.status().message()));
  }
  if (const absl::Status status = MakePhases(o); !status.ok()) {
    return Usage(std::string(status.message()));
  }
  const absl::StatusOr<int> status = Serve(std::move(o), NewReport("serve", invocation));
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
