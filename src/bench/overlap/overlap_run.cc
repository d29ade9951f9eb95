#include "src/bench/overlap/overlap_run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/forwarding_policy.h"
#include "src/attention/latent/latent_views.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/engine_run.h"
#include "src/bench/harness/step_device.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/overlap/forced_misses.h"

namespace sluice::bench {
namespace {

// The windows of each level: one to settle, then windows with and without transfers in turn,
// beginning and ending with transfers, so that the growth of the contexts affects both kinds
// equally.
constexpr bool kSkips[] = {false, false, true, false, true, false};
constexpr int kWindows = std::size(kSkips);
// Traced windows: one to settle, then one of each kind.
constexpr bool kTracedSkips[] = {false, false, true};
constexpr int kTracedWindows = std::size(kTracedSkips);
constexpr int kTracedSteps = 6;
// Steps at a window's begin that do not count: the device may be that far behind the host.
constexpr int kEdgeSteps = 2;
// Entries per list in the measurement of the transfers' rate.
constexpr double kLongList = 512;

// The script of one run of the engine: windows of `steps` steps, each with its number of misses and
// whether it fetches.
struct Script {
  int steps = 0;
  std::vector<bool> skips;  // By window.
  std::vector<int> misses;  // By window; empty: the indexer's own selections.
  size_t WindowOf(int64_t step) const {
    const int64_t window = (step - kEngineWarmUpTokens) / steps;
    return static_cast<size_t>(
        std::clamp<int64_t>(window, 0, static_cast<int64_t>(skips.size()) - 1));
  }
};

Script ScriptOf(const OverlapOptions& options, bool traced) {
  Script script;
  script.steps = traced ? std::min(options.steps, kTracedSteps) : options.steps;
  for (const std::optional<int>& level : options.levels) {
    for (int w = 0; w < (traced ? kTracedWindows : kWindows); ++w) {
      script.skips.push_back(traced ? kTracedSkips[w] : kSkips[w]);
      if (level.has_value()) script.misses.push_back(*level);
    }
  }
  SLUICE_CHECK(script.misses.empty() || script.misses.size() == script.skips.size(),
               "either all selections are forced, or none is");
  return script;
}

EngineRunOptions RunOptions(const Script& script, const std::vector<Context>* contexts, int batch) {
  EngineRunOptions options;
  options.batch = batch;
  options.windows = static_cast<int>(script.skips.size());
  options.steps = script.steps;
  options.contexts = contexts;
  if (contexts != nullptr) options.context = static_cast<int>(contexts->front().tokens.size());
  return options;
}

// Plays the script: decides what the engine's next step is and what its rows select.
class ScriptedPolicy : public ForwardingPolicy {
 public:
  // `skip` is read by the wrapped policy and by the engine's device. `lists` may be null.
  ScriptedPolicy(std::unique_ptr<AttentionPolicy> policy, const Script& script, int context,
                 bool* skip, ForcedMisses* lists)
      : ForwardingPolicy(policy.get()),
        policy_(std::move(policy)),
        script_(script),
        context_(context),
        skip_(skip),
        lists_(lists) {}

  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    ForwardingPolicy::BeginStep(stream, slots, positions);
    if (positions.empty()) return;
    // Prompt rows count as the first step. The shortest sequence is the youngest, which determines
    // the windows.
    steps_.clear();
    for (const int32_t position : positions) {
      steps_.push_back(std::max<int64_t>(position - context_, 0));
    }
    *skip_ = script_.skips[script_.WindowOf(*std::min_element(steps_.begin(), steps_.end()))];
    if (lists_ != nullptr) lists_->BeginStep(stream, steps_);
  }

 private:
  const std::unique_ptr<AttentionPolicy> policy_;
  const Script script_;
  const int context_;
  bool* const skip_;
  ForcedMisses* const lists_;
  std::vector<int64_t> steps_;
};

// Returns the misses by step, for the lists: those of the step's window.
std::vector<int32_t> MissesBySteps(const Script& script, int tokens) {
  std::vector<int32_t> misses;
  for (int64_t step = 0; step < tokens; ++step) {
    misses.push_back(script.misses[script.WindowOf(step)]);
  }
  return misses;
}

// The result of one run of the script, on a policy made for it.
struct Played {
  std::vector<EngineWindow> windows;
  std::vector<PolicyStatistics> marks;  // [windows + 1]
  StepTrace trace;                      // Empty unless requested.
};
absl::StatusOr<Played> Play(const PolicyWorld& world, const std::string& name,
                            const std::vector<Context>& contexts, int batch, const Script& script,
                            bool traced) {
  EngineRunOptions options = RunOptions(script, &contexts, batch);
  options.dram = world.dram;
  bool skip = false;
  PolicyWorld own = world;
  std::unique_ptr<ForcedMisses> lists;
  if (!script.misses.empty()) {
    // Pools begin with the newest tokens, which no list contains.
    own.options.recompute_last = PolicyOptions::RecomputeLast::kOff;
    SLUICE_ASSIGN_OR_RETURN(const auto policy, SetUpPolicy(own, name));
    ForcedMisses::Options set;
    set.device = world.device;
    set.rows = std::max(world.slots, world.device->RowBucket(world.slots));
    set.top_k = world.model->config().latent->indexer->top_k;
    const int64_t total = options.context + EngineTokens(options);
    set.places = policy->FootprintOf(options.context, total).hbm_tokens[kLatentKind];
    set.tokens = options.context - set.places;
    set.misses = MissesBySteps(script, EngineTokens(options));
    SLUICE_ASSIGN_OR_RETURN(lists, ForcedMisses::Create(set));
    own.options.ess.probe.on_selection = lists->Observer();
  }
  own.options.ess.probe.skip_transfers = &skip;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<AttentionPolicy> made, SetUpPolicy(own, name));
  ScriptedPolicy policy(std::move(made), script, options.context, &skip, lists.get());
  const std::unique_ptr<Device> device = NewStepDevice(
      world.device, {.version = &skip, .record = !OptionsOf(world, name).ess.probe.row_copies});
  Played played;
  played.marks.resize(script.skips.size() + 1);
  options.on_mark = [&](size_t mark) { played.marks[mark] = policy.Statistics(); };
  if (traced) {
    SLUICE_ASSIGN_OR_RETURN(played.trace, TraceSteps(options, world.slots, device.get(),
                                                     world.model, world.hbm, &policy));
    played.windows = played.trace.windows;
  } else {
    SLUICE_ASSIGN_OR_RETURN(played.windows, RunEngine(options, world.slots, device.get(),
                                                      world.model, world.hbm, &policy));
  }
  return played;
}

// Returns the seconds of a step, from a window's steps without the first ones.
double StepOf(const EngineWindow& window) {
  const std::vector<double>& gaps = window.token_gaps;
  const auto edge = std::min<size_t>(kEdgeSteps, gaps.size() - 1);
  const double sum = std::accumulate(gaps.begin() + static_cast<ptrdiff_t>(edge), gaps.end(), 0.0);
  return sum / static_cast<double>(gaps.size() - edge);
}

// Reads the traced windows of a level.
void ReadTrace(const Played& played, size_t level, const Script& script, OverlapLevel* out) {
  const auto part = [&](size_t window) {
    const EngineWindow& w = played.windows[level * kTracedWindows + window];
    const int edge = std::min(kEdgeSteps, script.steps - 1);
    return PartOf(played.trace, w.begin + (w.end - w.begin) * edge / script.steps, w.end);
  };
  const auto layers = static_cast<int>(out->misses.size());
  const TransfersInside with = TransfersIn(part(1), layers);
  const TransfersInside none = TransfersIn(part(2), layers);
  out->inside = FetchesOf(with, none);
  out->kernels = ComparedKernels(part(1), part(2), layers);
  if (none.compute_seconds > 0) out->compute_slowed = with.compute_seconds / none.compute_seconds;
  const Shelter shelter = ShelterIn(part(2));
  if (shelter.layers > 0) out->shelter = shelter;
}

}  // namespace

double OverlapLevel::HiddenOf(double transfer_seconds) const {
  return transfer_seconds <= 0 ? 1 : 1 - exposed() / transfer_seconds;
}

std::optional<double> OverlapLevel::Coverable() const {
  if (!shelter.has_value()) return std::nullopt;
  const double sum = std::accumulate(misses.begin(), misses.end(), 0.0);
  double coverable = 0;
  for (const double of : misses) {
    if (sum > 0) coverable += shelter->Coverable(alone.seconds * of / sum);
  }
  return coverable;
}

int OverlapTokens(const OverlapOptions& options) {
  return EngineTokens(RunOptions(ScriptOf(options, false), nullptr, 1));
}

absl::StatusOr<OverlapRun> RunOverlap(const PolicyWorld& world, const std::string& name,
                                      const std::vector<Context>& contexts, int batch,
                                      const OverlapOptions& options) {
  OverlapRun run;
  run.policy = name;
  run.batch = batch;
  run.context = static_cast<int>(contexts.front().tokens.size());
  const Script script = ScriptOf(options, false);
  SLUICE_ASSIGN_OR_RETURN(const Played played, Play(world, name, contexts, batch, script, false));
  for (size_t l = 0; l < options.levels.size(); ++l) {
    OverlapLevel& level = run.levels.emplace_back();
    level.set = options.levels[l];
    const size_t first = l * kWindows;
    std::vector<double> with, without;
    for (size_t w = 1; w < kWindows; ++w) {
      (kSkips[w] ? without : with).push_back(StepOf(played.windows[first + w]));
    }
    level.step = TimingOf(with);
    level.without = TimingOf(without);
    // Leaves out the last window, whose end may include a step of the next level.
    level.misses = MissesByLayer(played.marks[first + kWindows - 1].Since(played.marks[first + 1]));
  }
  if (options.trace) {
    const Script traced = ScriptOf(options, true);
    SLUICE_ASSIGN_OR_RETURN(Played seen, Play(world, name, contexts, batch, traced, true));
    for (size_t l = 0; l < run.levels.size(); ++l) ReadTrace(seen, l, traced, &run.levels[l]);
    run.trace = std::move(seen.trace);
    run.trace.name = absl::StrCat(name, ", overlap, ", run.trace.name);
  }
  const PolicyOptions of = OptionsOf(world, name);
  const size_t layers = run.levels[0].misses.size();
  const double most = std::min<double>(kLongList, of.index_top_k);
  SLUICE_ASSIGN_OR_RETURN(
      const TransferAlone longest,
      MeasureTransferAlone(of, batch, run.context, std::vector<double>(layers, most)));
  run.long_rate = longest.rate();
  for (OverlapLevel& level : run.levels) {
    SLUICE_ASSIGN_OR_RETURN(level.alone,
                            MeasureTransferAlone(of, batch, run.context, level.misses));
    if (run.long_rate > 0) level.rate_seconds = level.alone.bytes / run.long_rate;
  }
  return run;
}

}  // namespace sluice::bench
