#include "src/bench/ranks/ranks_options.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/bench/harness/policy_choice.h"
#include "src/device/rank_group.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Times decode steps of a model that several ranks divide, each a process of this host with a GPU of its own
where there are enough. Rank 0 plans the steps and the others follow, as in a node; there is no gRPC.

The columns are the median time of a step and its 10th-90th percentiles, tokens/s and how many times those of
one rank, then a step without the ranks' operations (its results are wrong) and their share of a step: what a
step would save without them, waits for slower ranks included. The last columns are of a trace of rank 0: the
time that its operations of the group take in a step, the part of it in which no other kernel runs, and the
rate of exchanges between ranks. A kernel that waits for a slower rank counts as long as it waits.

Contexts are not computed: keys and values are random, and latent caches hold zeros. Under ess every row
misses --misses entries in each layer. Ranks of experts have --batches sequences each. The report is written
after every line.
)";
constexpr char kExamples[] =
    R"(  sluice-bench ranks --model models/smollm2-135m-instruct --ranks 1,3 --batches 1,4 --context 512
  sluice-bench ranks --device cuda --model configs/models/qwen3-14b --dummy --ranks 1,2 --batches 1,8,32,64
  sluice-bench ranks --device cuda --model MODEL --dummy --divide experts --ranks 2 --context 32768 \
      --batches 32 --policies full,ess:ratio=0.2 --misses 200 --expert-overlap 0,1
)";

// Returns what is wrong with options that fit the flags one by one; empty: nothing.
std::string WrongWith(const RanksOptions& o) {
  if (o.model.empty()) return "--model is missing";
  for (const std::string& policy : o.policies) {
    const bool ess = absl::StartsWith(policy, "ess");
    if (policy != "full" && !ess) {
      return absl::StrCat("--policies: ranks are timed under full and ess, not ", policy);
    }
    if (ess && !o.experts()) return "--policies: ess needs --divide experts";
  }
  const bool overlaps =
      std::any_of(o.overlaps.begin(), o.overlaps.end(), [](int64_t rows) { return rows > 0; });
  if (overlaps && !o.experts()) return "--expert-overlap needs --divide experts";
  if (o.dispatch == "fp8" && !o.experts()) return "--expert-dispatch fp8 needs --divide experts";
  return "";
}

}  // namespace

std::optional<int> ReadRanksOptions(const Invocation& invocation, RanksOptions* o) {
  Flags flags("sluice-bench ranks", kAbout, kExamples);
  flags.Choice("device", {"cpu", "cuda"}, "device that the model runs on", &o->device);
  flags.Text("model", "DIR", "Hugging Face directory", &o->model);
  flags.Switch("dummy", "use formula weights: only config.json is read", &o->dummy);
  flags.Text("kernels", "NAME", "CPU kernels, as for sluice-server", &o->kernels);
  flags.Integer("threads",
                "compute threads of a rank on the CPU; 0: its share of the server's choice", 0,
                1024, &o->threads);
  flags.Choice("divide", {"tensors", "experts"},
               "what the ranks divide, as --tensor-parallel or --expert-parallel", &o->divide);
  flags.Integers("ranks", "numbers of ranks, one after the other", 1, kMaxRanks, &o->ranks);
  flags.Integers("batches", "numbers of sequences in a step; with --divide experts, of each rank",
                 1, 1024, &o->batches);
  flags.Integer("context", "tokens of each sequence", 2, 1 << 20, &o->context);
  flags.Text("policies", "LIST", "full, or ess with its settings, as for sluice-bench policies",
             &o->policies_text);
  flags.Integer("misses",
                "entries that a row misses in each layer under ess; 0: those of the indexer", 0,
                1 << 16, &o->misses);
  flags.Integers("expert-overlap",
                 "rows from which a step runs as two halves, as for sluice-server; 0: none does", 0,
                 1024, &o->overlaps);
  flags.Choice("expert-dispatch", {"bf16", "fp8"}, "form in which rows travel to their experts",
               &o->dispatch);
  flags.Integer("steps", "measured steps of each figure", 4, 1'000'000, &o->steps);
  flags.Integer("trace-steps",
                "steps that are traced for each figure, in a run of their own; 0: none", 0, 1000,
                &o->trace_steps);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o->json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  absl::StatusOr<std::vector<std::string>> policies = ParsePolicies(o->policies_text);
  if (!policies.ok()) return Usage(absl::StrCat("--policies: ", policies.status().message()));
  o->policies = *std::move(policies);
  if (const std::string wrong = WrongWith(*o); !wrong.empty()) return Usage(wrong);
  return std::nullopt;
}

}  // namespace sluice::bench
