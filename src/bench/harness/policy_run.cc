#include "src/bench/harness/policy_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/attention/policy_factory.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/engine_run.h"
#include "src/bench/harness/policy_choice.h"
#include "src/bench/harness/step_device.h"
#include "src/kv/sequence_cache.h"
#include "src/model/policy_model.h"

namespace sluice::bench {
namespace {

constexpr int kWindows = 4;
constexpr int kMostTracedSteps = 16;  // Each has about 2,000 slices.

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

// Returns whether a kernel is no part of the model's step, by the prefix of its name: it only moves
// K and V over the link and computes nothing, or belongs to a sequence's warm-up.
bool OutsideModel(const std::string& kernel) {
  for (const char* name :
       {"Transfer", "WriteThrough", "CopyRows", "TakeRing", "take_ring", "CopyBatch", "transfer",
        "write_through", "copy_rows", "Anchor", "anchor"}) {
    if (absl::StartsWith(kernel, name)) return true;
  }
  return false;
}

// Writes zeros to all pages that nobody owns.
void Clear(Device& device, const PagePool& pool) {
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCompute);
  for (const absl::Span<uint8_t> free : pool.FreeMemory()) {
    stream->Fill(free.data(), 0, free.size());
  }
  const std::unique_ptr<Event> done = device.NewEvent();
  stream->Record(*done);
  done->Wait();
}

}  // namespace

PolicyOptions OptionsOf(const PolicyWorld& world, const std::string& name) {
  PolicyOptions options = world.options;
  options.device = world.device;
  options.hbm = world.hbm;
  options.dram = world.dram;
  options.slots = world.slots;
  DescribeModel(*world.model, &options);
  options.max_context = world.max_context;
  return WithPolicy(std::move(options), name);
}

BenchTiers::BenchTiers(Buffer hbm, Buffer dram)
    : hbm_memory_(std::move(hbm)), dram_memory_(std::move(dram)) {}

absl::StatusOr<std::unique_ptr<BenchTiers>> BenchTiers::Create(Device& device, int64_t hbm_bytes,
                                                               int64_t dram_bytes) {
  SLUICE_ASSIGN_OR_RETURN(
      Buffer hbm, device.Allocate(MemoryKind::kDevice, static_cast<size_t>(hbm_bytes), "hbm"));
  SLUICE_ASSIGN_OR_RETURN(
      Buffer dram, device.Allocate(MemoryKind::kPinned, static_cast<size_t>(dram_bytes), "dram"));
  return std::unique_ptr<BenchTiers>(new BenchTiers(std::move(hbm), std::move(dram)));
}

absl::Status BenchTiers::Cut(PolicyWorld* world, const std::string& name) {
  world->options.hbm_bytes = static_cast<int64_t>(hbm_memory_.bytes());
  world->options.dram_bytes = static_cast<int64_t>(dram_memory_.bytes());
  const TierShapes shapes = TierShapesOf(OptionsOf(*world, name), world->model->cache_layout());
  const auto pool = [](const char* tier, const TierShape& shape, const Buffer& memory) {
    return PagePool::Create(tier, shape,
                            Buffer(memory.data(), memory.bytes(), [](void*, size_t) {}));
  };
  SLUICE_ASSIGN_OR_RETURN(hbm_, pool("hbm", shapes.hbm, hbm_memory_));
  SLUICE_ASSIGN_OR_RETURN(dram_, pool("dram", shapes.dram, dram_memory_));
  world->hbm = hbm_.get();
  world->dram = dram_.get();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> SetUpPolicy(const PolicyWorld& world,
                                                             const std::string& name) {
  PolicyOptions options = OptionsOf(world, name);
  // With transfers skipped, slots keep what another policy left there, which might be NaN.
  if (options.ess.probe.skip_transfers != nullptr) Clear(*world.device, *world.hbm);
  absl::StatusOr<std::unique_ptr<AttentionPolicy>> policy = NewPolicy(std::move(options));
  if (policy.ok()) return policy;
  return absl::Status(policy.status().code(),
                      absl::StrCat("policy ", name, ": ", policy.status().message()));
}

Admission LargestBatch(const PolicyWorld& world, AttentionPolicy& policy, int64_t context,
                       int64_t total) {
  Admission found;
  found.each = policy.FootprintOf(context, total);
  found.hbm_bytes_each = world.hbm->layout().BytesFor(found.each.hbm_tokens);
  // Footprint of a running sequence.
  const TokensByKind home = policy.FootprintOf(0, total).dram_tokens;
  found.dram_bytes_each = world.dram->layout().BytesFor(home);
  int& batch = found.batch;
  bool arrives = true;
  for (; batch < world.slots; ++batch) {
    // A sequence arrives with everything that is handed over, beside the running ones.
    arrives = !world.dram->TryReserve(found.each.dram_tokens).empty();
    if (!arrives) break;
    std::unique_ptr<SequenceCache> none;
    if (!policy.Admit(batch, 0, total, Promise::kFirm, none)) break;
  }
  for (int slot = 0; slot < batch; ++slot) {
    policy.WarmEvent(slot).Wait();
    SLUICE_CHECK(policy.Warm(slot));
    policy.Release(slot);
  }
  const bool dram = !arrives || world.dram->SequencesThatFit(home) <= batch;
  found.bound = batch == world.slots ? "slots" : dram ? "DRAM" : "HBM";
  return found;
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
    if (layer.lookups == 0 && layer.selected == 0) continue;
    steps += layer.lookups > 0 ? layer.lookups : layer.steps;
    recalls += layer.lookups > 0 ? layer.misses : layer.recalls;
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

double PolicyRun::CpuTokens() const {
  int64_t rows = 0, missing = 0;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    if (layer.selected == 0) continue;
    rows += layer.steps;
    missing += layer.missing;
  }
  return rows == 0 ? 0 : static_cast<double>(missing) / static_cast<double>(rows * kv_heads);
}

double PolicyRun::WorkersBusy() const {
  if (workers.workers == 0 || counted <= absl::ZeroDuration()) return 0;
  return absl::FDivDuration(workers.busy, workers.workers * counted);
}

std::vector<double> MissesByLayer(const PolicyStatistics& statistics) {
  std::vector<double> misses;
  for (const PolicyStatistics::Layer& layer : statistics.layers) {
    const double rows = static_cast<double>(std::max<int64_t>(layer.steps, 1));
    misses.push_back(static_cast<double>(layer.missing) / rows);
  }
  return misses;
}

LayerSpread SpreadOfLayers(const std::vector<double>& layers) {
  if (layers.empty()) return {};
  const auto [least, most] = std::minmax_element(layers.begin(), layers.end());
  const double sum = std::accumulate(layers.begin(), layers.end(), 0.0);
  return {sum / static_cast<double>(layers.size()), *least, *most};
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
    if (slice.kind != TraceSlice::Kind::kKernel || OutsideModel(slice.name)) continue;
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
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy, SetUpPolicy(world, name));
  EngineRunOptions options = RunOptions(contexts, batch, steps, world.dram);
  PolicyRun run;
  run.policy = name;
  run.batch = batch;
  run.context = options.context;
  run.budget_tokens = OptionsOf(world, name).budget_tokens;
  run.kv_heads = world.model->cache_layout().kinds[0].heads;
  run.latent = world.model->config().latent.has_value();
  if (run.latent) run.budget_tokens = OptionsOf(world, name).index_top_k;
  PolicyStatistics before;
  WorkerStatistics workers_before;
  absl::Time counted_from;
  options.on_edge = [&](bool last) {
    run.statistics = policy->Statistics().Since(before);
    run.workers = policy->Workers();
    run.workers.busy -= workers_before.busy;
    run.workers.tokens -= workers_before.tokens;
    run.counted = absl::Now() - counted_from;
    if (last) return;
    counted_from = absl::Now();
    before = run.statistics;
    workers_before = run.workers;
  };
  // Copies by the host wait for the stream, which a recorded step cannot do.
  std::unique_ptr<Device> unrecorded;
  if (OptionsOf(world, name).ess.probe.row_copies) {
    unrecorded = NewStepDevice(world.device, {.record = false});
  }
  Device* const device = unrecorded != nullptr ? unrecorded.get() : world.device;
  // The statistics since the policy's creation: it has decoded nothing else.
  options.first_tokens = kFirstSteps;
  options.on_first = [&] { run.first = policy->Statistics(); };
  PolicyStatistics half;
  options.on_mark = [&](size_t mark) {
    if (mark == kWindows / 2) half = policy->Statistics();
    if (mark == kWindows) run.steady = policy->Statistics().Since(half);
  };
  SLUICE_ASSIGN_OR_RETURN(
      const std::vector<EngineWindow> windows,
      RunEngine(options, world.slots, device, world.model, world.hbm, policy.get()));
  options.on_edge = nullptr;
  options.on_first = nullptr;
  options.on_mark = nullptr;
  std::vector<double> step, gaps;
  for (const EngineWindow& window : windows) {
    step.push_back(window.step_seconds);
    gaps.insert(gaps.end(), window.token_gaps.begin(), window.token_gaps.end());
  }
  run.step = TimingOf(step);
  run.tpot_p50 = Percentile(gaps, 0.5);
  run.tpot_p99 = Percentile(gaps, 0.99);
  run.step_bytes = BytesOfStep(StepModel::Of(*world.model), *policy, run.statistics, batch,
                               run.context + 0.5 * kWindows * steps);
  if (trace == nullptr) return run;
  options.windows = 1;
  options.steps = std::min(steps, kMostTracedSteps);
  SLUICE_ASSIGN_OR_RETURN(
      *trace, TraceSteps(options, world.slots, device, world.model, world.hbm, policy.get()));
  run.idle_share = IdleShare(*trace);
  trace->name = absl::StrCat(name, ", ", trace->name);
  return run;
}

absl::StatusOr<MeanSelection> FindMeanSelection(const PolicyWorld& world, const std::string& name,
                                                const std::vector<Context>& contexts,
                                                double tokens) {
  // Beta is sought between 2^-kMost and 2^kMost.
  constexpr double kMost = 10;
  constexpr int kHalvings = 8, kSteps = 2;
  constexpr double kClose = 0.03;
  MeanSelection found;
  double low = -kMost, high = kMost;  // The selection shrinks as beta grows.
  for (int i = 0; i < kHalvings; ++i) {
    // Beta 1, which suits most workloads, is tried first.
    const double power = i == 0 ? 0 : (low + high) / 2;
    PolicyWorld one = world;
    one.options.hgca.beta = found.beta = static_cast<float>(std::exp2(power));
    SLUICE_ASSIGN_OR_RETURN(const PolicyRun run,
                            RunPolicy(one, name, contexts, 1, kSteps, nullptr));
    found.tokens = run.CpuTokens();
    if (std::abs(found.tokens - tokens) < kClose * tokens) break;
    (found.tokens > tokens ? low : high) = power;
  }
  return found;
}

}  // namespace sluice::bench
