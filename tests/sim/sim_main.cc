// sluice-sim: runs seeds through the real engine, scheduler and KV store on a simulated device.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "absl/time/clock.h"
#include "src/base/logging.h"
#include "tests/sim/runner.h"

namespace sluice::sim {
namespace {

constexpr char kHelp[] =
    R"(sluice-sim: runs the engine, the scheduler and the KV store on a simulated device and clock.

Every seed is a node with sizes of its own and a mix of requests: transfers in pieces, repeated,
corrupted, held up, aborted; cancels, deadlines, slow readers, drains, leaps of the clock, stalled
streams. Each token is held against what its request alone must give, and after every happening
what must always hold is asserted. A seed that fails is printed with the command that replays it.

  --seeds A..B      the seeds from A to B (default 1..2000); also --seeds N for 1..N
  --seed N          one seed
  --trace           print what happens (with --seed)
  --jobs N          processes (default 1)
  --twice           run every seed twice: both must go the same way
  --policy NAME     every node has this policy (default: any)
  --plant NAME      break something on purpose; some seed must report it
  --check-plants    each of the plants in turn: fails if no seed reports one
  --help            this

Exit status: 0 if every seed passed and, from 1,000 seeds of any policy on, every situation occurred.
)";

constexpr Plant kPlants[] = {Plant::kEarlyEvents, Plant::kLostCopies, Plant::kChecksumSkipped,
                             Plant::kTokenTwice,  Plant::kTokenLost,  Plant::kEndLost,
                             Plant::kEndTwice,    Plant::kWakeLost,   Plant::kDeadlineForgotten,
                             Plant::kPageLeaked,  Plant::kStrayWrite};

constexpr const char* kPolicies[] = {"full", "oracle",  "scout", "recall",       "hgca",
                                     "clo",  "fluxion", "ess",   "offload-naive"};

// Fewer seeds may well miss a rare situation.
constexpr uint64_t kSeedsForEverything = 1000;

std::optional<uint64_t> ToNumber(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool ParseSeeds(std::string_view text, RunOptions* options) {
  const size_t dots = text.find("..");
  const auto first = dots == std::string_view::npos ? 1 : ToNumber(text.substr(0, dots));
  const auto last = ToNumber(dots == std::string_view::npos ? text : text.substr(dots + 2));
  if (!first.has_value() || !last.has_value() || *first > *last) return false;
  options->first_seed = *first;
  options->last_seed = *last;
  return true;
}

int Usage(const std::string& what) {
  std::fprintf(stderr, "sluice-sim: %s (see --help)\n", what.c_str());
  return 2;
}

void PrintFailure(const RunResult& run, const RunOptions& options) {
  std::printf("seed %llu failed %s\nreplay: %s\n",
              static_cast<unsigned long long>(run.failed_seed.load()), run.failure,
              ReplayCommand(run.failed_seed, options).c_str());
}

// Prints how often each situation occurred; returns how many never did.
int PrintSituations(const RunResult& run) {
  int never = 0;
  for (size_t i = 0; i < kSituations; ++i) {
    const uint64_t count = run.counts[i];
    never += count == 0 ? 1 : 0;
    std::printf("  %-42s %10llu%s\n", Name(static_cast<Situation>(i)),
                static_cast<unsigned long long>(count), count == 0 ? "  NEVER" : "");
  }
  return never;
}

int CheckPlants(RunOptions options) {
  int missed = 0;
  for (const Plant plant : kPlants) {
    options.plant = plant;
    const RunResult& run = RunSeeds(options);
    missed += run.failed ? 0 : 1;
    if (run.failed) {
      std::printf("%-20s reported by seed %llu: %s\n", Name(plant),
                  static_cast<unsigned long long>(run.failed_seed.load()), run.failure);
    } else {
      std::printf("%-20s NOT REPORTED by any of %llu seeds\n", Name(plant),
                  static_cast<unsigned long long>(run.seeds.load()));
    }
    std::fflush(stdout);
  }
  return missed == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  RunOptions options;
  options.last_seed = 2000;
  bool check_plants = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const auto value = [&]() -> std::string_view { return ++i < argc ? argv[i] : ""; };
    if (arg == "--help") {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (arg == "--seeds") {
      if (!ParseSeeds(value(), &options)) return Usage("--seeds takes A..B or N");
    } else if (arg == "--seed") {
      const auto seed = ToNumber(value());
      if (!seed.has_value()) return Usage("--seed takes a number");
      options.first_seed = options.last_seed = *seed;
    } else if (arg == "--jobs") {
      const auto jobs = ToNumber(value());
      if (!jobs.has_value() || *jobs < 1 || *jobs > 256) return Usage("--jobs takes 1 to 256");
      options.jobs = static_cast<int>(*jobs);
    } else if (arg == "--plant") {
      const std::string_view name = value();
      for (const Plant plant : kPlants) {
        if (name == Name(plant)) options.plant = plant;
      }
      if (options.plant == Plant::kNone) return Usage("--plant: no such plant");
    } else if (arg == "--policy") {
      options.policy = value();
      if (std::find(std::begin(kPolicies), std::end(kPolicies), options.policy) ==
          std::end(kPolicies)) {
        return Usage(
            "--policy takes full, oracle, scout, recall, hgca, clo, fluxion, ess or "
            "offload-naive");
      }
    } else if (arg == "--trace") {
      options.trace = true;
    } else if (arg == "--twice") {
      options.twice = true;
    } else if (arg == "--check-plants") {
      check_plants = true;
    } else {
      return Usage("unknown argument " + std::string(arg));
    }
  }
  // Events are printed by --trace, in virtual time.
  SetUpLogging(LogLevel::kError, LogFormat::kText);
  if (check_plants) return CheckPlants(options);

  const absl::Time start = absl::Now();
  const RunResult& run = RunSeeds(options);
  if (run.failed) {
    PrintFailure(run, options);
    return 1;
  }
  const uint64_t seeds = options.last_seed - options.first_seed + 1;
  int never = 0;
  if (seeds > 1) never = PrintSituations(run);
  std::printf("%llu seeds passed in %.1f s\n", static_cast<unsigned long long>(run.seeds.load()),
              absl::ToDoubleSeconds(absl::Now() - start));
  // Not every policy preempts, or has workers that fail.
  if (never > 0 && seeds >= kSeedsForEverything && options.policy.empty()) {
    std::printf("%d situations never occurred: the seeds test less than they say\n", never);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice::sim

int main(int argc, char** argv) { return sluice::sim::Main(argc, argv); }
