// sluice-bench measures Sluice on this machine. Its subcommands are in src/bench.
#include <cstdio>
#include <string>
#include <vector>

#include "src/base/nearest_name.h"
#include "src/bench/report/subcommand.h"

namespace sluice::bench {
namespace {

constexpr char kHelp[] = R"(sluice-bench measures Sluice on this machine.

  sluice-bench serve       puts load on a running decode node: throughput, latencies, refusals
  sluice-bench kernels     checks and times the CPU kernels, beside the speed of the machine's memory
  sluice-bench step        times decode steps and a prefill of a whole model, without gRPC
  sluice-bench ranks       times decode steps of a model that several processes divide, without gRPC
  sluice-bench ingest      times KV caches on their way into a node, beside raw gRPC, and what that
                           costs the sequences that decode
  sluice-bench policies    compares attention policies: speed, bytes moved, distance from policy full
  sluice-bench simulate    forecasts decode steps of a DeepSeek-V3.2 rank from the times of single operators
  sluice-bench --compare A.json B.json
                           compares two reports of one subcommand, figure by figure

  sluice-bench SUBCOMMAND --help    lists its flags and examples

Every report names its command, shape, machine and revision, and gives each figure with its spread. --json
FILE writes it for --compare and for programs. Measure on a quiet machine.
)";

struct Subcommand {
  const char* name;
  int (*run)(const Invocation&);
};
constexpr Subcommand kSubcommands[] = {{"serve", RunServeBench},   {"kernels", RunKernelBench},
                                       {"step", RunStepBench},     {"ranks", RunRanksBench},
                                       {"ingest", RunIngestBench}, {"policies", RunPoliciesBench},
                                       {"simulate", RunSimulate},  {"--compare", RunCompare}};

int BenchMain(int argc, char** argv) {
  Invocation invocation;
  invocation.command = "sluice-bench";
  for (int i = 1; i < argc; ++i) invocation.command += std::string(" ") + argv[i];
  const std::string name = argc > 1 ? argv[1] : "--help";
  if (name == "--help" || name == "-h") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  invocation.args.assign(argv + 2, argv + argc);
  std::vector<std::string> names;
  for (const Subcommand& s : kSubcommands) {
    if (name == s.name) return s.run(invocation);
    names.emplace_back(s.name);
  }
  return Usage("there is no subcommand " + name + DidYouMean(name, names));
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::BenchMain(argc, argv); }
