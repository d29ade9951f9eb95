#include "src/bench/policy_run.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/policy_factory.h"
#include "src/base/status_macros.h"
#include "src/bench/engine_run.h"
#include "src/bench/policy_choice.h"
#include "src/kv/sequence_cache.h"

namespace sluice {
namespace {

constexpr int kWindows = 4;

EngineRunOptions RunOptions(const std::vector<Context>& contexts, int batch, int steps,
                            PagePool* dram) {
  EngineRunOptions options;
  options.batch = batch;
  options.context = static_cast<int>(contexts.front().tokens.size());
  options.windows = kWindows;
  options.steps = steps;
  options.contexts = &contexts;
  options.dram = dram;
  return options;
}

absl::StatusOr<std::unique_ptr<PagePool>> MakePool(const PolicyWorld& world, const char* name,
                                                   MemoryKind kind, int64_t bytes) {
  SLUICE_ASSIGN_OR_RETURN(Buffer arena,
                          world.device->Allocate(kind, static_cast<size_t>(bytes), name));
  return PagePool::Create(name, world.model->cache_layout(), std::move(arena));
}

}  // namespace

absl::StatusOr<PolicySetup> SetUpPolicy(const PolicyWorld& world, const std::string& name) {
  PolicySetup setup;
  SLUICE_ASSIGN_OR_RETURN(setup.hbm, MakePool(world, "hbm", MemoryKind::kDevice, world.hbm_bytes));
  SLUICE_ASSIGN_OR_RETURN(setup.dram,
                          MakePool(world, "dram", MemoryKind::kPinned, world.dram_bytes));
  PolicyOptions options = WithPolicy(world.options, name);
  options.device = world.device;
  options.hbm = setup.hbm.get();
  options.dram = setup.dram.get();
  options.slots = world.slots;
  options.max_context = world.max_context;
  options.heads = world.model->config().heads;
  absl::StatusOr<std::unique_ptr<AttentionPolicy>> policy = NewPolicy(options);
  if (!policy.ok()) {
    return absl::Status(policy.status().code(),
                        absl::StrCat("policy ", name, ": ", policy.status().message()));
  }
  setup.policy = *std::move(policy);
  return setup;
}

int LargestBatch(PolicySetup& setup, int slots, int64_t total) {
  int batch = 0;
  for (; batch < slots; ++batch) {
    std::unique_ptr<SequenceCache> none;
    if (!setup.policy->Admit(batch, 0, total, Promise::kFirm, none)) break;
  }
  for (int slot = 0; slot < batch; ++slot) {
    setup.policy->WarmEvent(slot).Wait();
    SLUICE_CHECK(setup.policy->Warm(slot));
    setup.policy->Release(slot);
  }
  return batch;
}

double PolicyRun::CpuShare() const {
  double sum = 0;
  int layers = 0;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    if (layer.selected == 0) continue;
    sum += layer.Share(budget_tokens, kv_heads);
    ++layers;
  }
  return layers == 0 ? 0 : sum / layers;
}

double PolicyRun::HitRate() const {
  int64_t selected = 0, missing = 0;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    selected += layer.selected;
    missing += layer.missing;
  }
  return selected == 0 ? 1 : 1 - static_cast<double>(missing) / static_cast<double>(selected);
}

double PolicyRun::RecallInterval() const {
  int64_t steps = 0, recalls = 0;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    if (layer.selected == 0) continue;
    steps += layer.steps;
    recalls += layer.recalls;
  }
  return recalls == 0 ? 0 : static_cast<double>(steps) / static_cast<double>(recalls);
}

double PolicyRun::LinkBytesPerStep() const {
  int64_t bytes = 0, rows = 0;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    bytes += layer.link_bytes;
    rows = std::max(rows, layer.steps);
  }
  return rows == 0 ? 0 : static_cast<double>(bytes) * batch / static_cast<double>(rows);
}

int PolicyRunTokens(int steps) {
  EngineRunOptions options;
  options.windows = kWindows;
  options.steps = steps;
  return EngineTokens(options);
}

double IdleShare(const StepTrace& trace) {
  std::vector<std::pair<absl::Time, absl::Time>> busy;
  for (const TraceSlice& slice : trace.device) {
    if (slice.kind != TraceSlice::Kind::kKernel) continue;
    busy.emplace_back(std::max(slice.begin, trace.begin), std::min(slice.end, trace.end));
  }
  std::sort(busy.begin(), busy.end());
  absl::Duration idle;
  absl::Time until = trace.begin;
  for (const auto& [begin, end] : busy) {
    if (begin > until) idle += begin - until;
    until = std::max(until, end);
  }
  idle += trace.end - until;
  return absl::FDivDuration(idle, trace.end - trace.begin);
}

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

absl::StatusOr<PolicyRun> RunPolicy(const PolicyWorld& world, const std::string& name,
                                    const std::vector<Context>& contexts, int batch, int steps,
                                    StepTrace* trace) {
  SLUICE_ASSIGN_OR_RETURN(PolicySetup setup, SetUpPolicy(world, name));
  EngineRunOptions options = RunOptions(contexts, batch, steps, setup.dram.get());
  SLUICE_ASSIGN_OR_RETURN(const std::vector<EngineWindow> windows,
                          RunEngine(options, world.slots, world.device, world.model,
                                    setup.hbm.get(), setup.policy.get()));
  PolicyRun run;
  run.policy = name;
  run.batch = batch;
  run.context = options.context;
  run.budget_tokens = world.options.budget_tokens;
  run.kv_heads = world.model->config().kv_heads;
  std::vector<double> step, gaps;
  for (const EngineWindow& window : windows) {
    step.push_back(window.step_seconds);
    gaps.insert(gaps.end(), window.token_gaps.begin(), window.token_gaps.end());
  }
  run.step = TimingOf(step);
  run.tpot_p50 = Percentile(gaps, 0.5);
  run.tpot_p99 = Percentile(gaps, 0.99);
  run.statistics = setup.policy->Statistics();
  SLUICE_ASSIGN_OR_RETURN(
      StepTrace traced, TraceSteps(options, world.slots, world.device, world.model, setup.hbm.get(),
                                   setup.policy.get()));
  run.idle_share = IdleShare(traced);
  if (trace != nullptr) {
    *trace = std::move(traced);
    trace->name = absl::StrCat(name, ", ", trace->name);
  }
  return run;
}

}  // namespace sluice
