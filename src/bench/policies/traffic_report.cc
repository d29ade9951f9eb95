#include "src/bench/policies/traffic_report.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/base/timing.h"
#include "src/device/trace.h"

namespace sluice::bench {
namespace {

constexpr char kSteady[] = "steady", kMixed[] = "mixed", kStaggered[] = "staggered";

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double Largest(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// Quotients of a run's steps over its median step.
struct Costs {
  double median = 0;                       // seconds
  double jump = 0, worst_jump = 0;         // steps of jumps
  double after_jump = 0, worst_after = 0;  // the three steps after them
  double arrival = 0, worst_arrival = 0;   // steps beside arrivals
};
Costs CostsOf(const TrafficRun& run) {
  Costs costs;
  costs.median = Percentile(run.steps, 0.5);
  const auto over = [&](double seconds) { return costs.median > 0 ? seconds / costs.median : 0; };
  costs.jump = over(Mean(run.jumps));
  costs.worst_jump = over(Largest(run.jumps));
  costs.after_jump = over(Mean(run.after_jumps));
  costs.worst_after = over(Largest(run.after_jumps));
  costs.arrival = over(Mean(run.beside_arrivals));
  costs.worst_arrival = over(Largest(run.beside_arrivals));
  return costs;
}

Figure TrafficFigure(const TrafficFigures& f) {
  Figure figure =
      SecondsFigure(absl::StrFormat("step, %s, %s traffic, batch %d", f.policy, f.traffic, f.batch),
                    TimingOf(f.run.steps));
  figure.more = {{"tokens_per_second", f.run.tokens_per_second},
                 {"tpot_p50_seconds", Percentile(f.run.gaps, 0.5)},
                 {"tpot_p99_seconds", Percentile(f.run.gaps, 0.99)}};
  return figure;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseTraffics(const std::string& text) {
  const std::vector<std::string> known = {kSteady, kMixed, kStaggered};
  std::vector<std::string> out = absl::StrSplit(text, ',');
  for (const std::string& name : out) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat("expected any of ", absl::StrJoin(known, ", "),
                                                   ", found '", name, "'",
                                                   DidYouMean(name, known)));
  }
  return out;
}

std::vector<TrafficSequence> SequencesOf(const std::string& traffic, int batch, size_t lengths,
                                         size_t distinct, int steps) {
  const int all = kEngineWarmUpTokens + 4 * steps;
  const size_t longest = (lengths - 1) * distinct;
  std::vector<TrafficSequence> out;
  for (int i = 0; i < batch; ++i) {
    const auto at = static_cast<size_t>(i);
    TrafficSequence sequence;
    sequence.tokens = all;
    // The first one has the longest context, and the lengths take turns.
    sequence.context = traffic == kMixed
                           ? (lengths - 1 - at % lengths) * distinct + at / lengths % distinct
                           : longest + at % distinct;
    const int first = (batch + 1) / 2;
    if (traffic == kStaggered && i > 0 && i < first) {
      sequence.tokens = all - std::max(2 * steps * i / first, 1);
    } else if (traffic == kStaggered && i >= first) {
      sequence.after = kEngineWarmUpTokens + 1 + 3 * steps * (i - first) / (batch - first);
      sequence.tokens = std::max(steps, 2);
    }
    out.push_back(sequence);
  }
  return out;
}

std::string TrafficHeader() {
  return absl::StrFormat("%-20s %-9s %5s %9s %8s %8s %8s %7s %13s %13s %13s\n", "policy", "traffic",
                         "batch", "tokens/s", "p50 ms", "p99 ms", "p99/p50", "idle", "jump (worst)",
                         "after (worst)", "beside arrival");
}

std::string TrafficLine(const TrafficFigures& f) {
  const Costs costs = CostsOf(f.run);
  const double p50 = Percentile(f.run.gaps, 0.5), p99 = Percentile(f.run.gaps, 0.99);
  const auto times = [](double mean, double worst) {
    return mean == 0 ? std::string("-") : absl::StrFormat("%.2f x (%.2f)", mean, worst);
  };
  return absl::StrFormat(
      "%-20s %-9s %5d %9.1f %8.2f %8.2f %8.2f %7s %13s %13s %13s\n", f.policy, f.traffic, f.batch,
      f.run.tokens_per_second, p50 * 1e3, p99 * 1e3, p50 > 0 ? p99 / p50 : 0,
      f.idle_share < 0 ? "-" : absl::StrFormat("%.1f%%", 100 * f.idle_share),
      times(costs.jump, costs.worst_jump), times(costs.after_jump, costs.worst_after),
      times(costs.arrival, costs.worst_arrival));
}

nlohmann::json TrafficJson(const TrafficFigures& f) {
  const Costs costs = CostsOf(f.run);
  nlohmann::json out = {{"policy", f.policy},
                        {"traffic", f.traffic},
                        {"batch", f.batch},
                        {"steps", f.run.steps.size()},
                        {"jumps", f.run.jumps.size()},
                        {"median_step_seconds", costs.median},
                        {"jump_over_median", costs.jump},
                        {"worst_jump_over_median", costs.worst_jump},
                        {"after_jump_over_median", costs.after_jump},
                        {"worst_after_jump_over_median", costs.worst_after},
                        {"arrival_over_median", costs.arrival},
                        {"worst_arrival_over_median", costs.worst_arrival}};
  if (f.idle_share >= 0) out["idle_share"] = f.idle_share;
  for (const auto& [name, value] : TrafficFigure(f).more) out[name] = value;
  return out;
}

absl::Status TrafficReport::Run(BenchTiers& tiers, PolicyWorld* world, const std::string& policy,
                                const std::vector<Context>& contexts, size_t lengths) {
  SLUICE_RETURN_IF_ERROR(tiers.Cut(world, policy));
  SLUICE_ASSIGN_OR_RETURN(const std::vector<std::string> traffics, ParseTraffics(options_.traffic));
  for (const std::string& traffic : traffics) {
    for (const int64_t batch : options_.batches) {
      const std::string title = absl::StrCat(traffic, " traffic, batch ", batch);
      clock_->Begin(policy, title);
      const std::vector<TrafficSequence> sequences =
          SequencesOf(traffic, static_cast<int>(batch), lengths, contexts.size() / lengths,
                      static_cast<int>(options_.steps));
      const absl::StatusOr<TrafficFigures> found =
          Measure(*world, policy, traffic, sequences, contexts);
      clock_->Pause();
      if (!found.ok()) {
        out_.Print(absl::StrCat(policy, ", ", title, ": ", found.status().ToString(), "\n"));
        report_->details["failures"].push_back({{"policy", policy},
                                                {"traffic", traffic},
                                                {"batch", batch},
                                                {"status", found.status().ToString()}});
        SLUICE_RETURN_IF_ERROR(world->device->Health());
        continue;
      }
      out_.Print(TrafficLine(*found));
      report_->figures.push_back(TrafficFigure(*found));
      report_->details["traffic"].push_back(TrafficJson(*found));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TrafficFigures> TrafficReport::Measure(const PolicyWorld& world,
                                                      const std::string& policy,
                                                      const std::string& traffic,
                                                      const std::vector<TrafficSequence>& sequences,
                                                      const std::vector<Context>& contexts) const {
  TrafficFigures out;
  out.policy = policy;
  out.traffic = traffic;
  out.batch = static_cast<int>(sequences.size());
  EngineRunOptions options;
  options.context = static_cast<int>(contexts.back().tokens.size());
  options.contexts = &contexts;
  options.dram = world.dram;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> made, SetUpPolicy(world, policy));
  const auto run = [&] {
    return RunTraffic(options, sequences, static_cast<int>(options_.jump), world.slots,
                      world.device, world.model, world.hbm, made.get());
  };
  SLUICE_ASSIGN_OR_RETURN(out.run, run());
  if (!options_.trace) return out;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceTrace> seen, world.device->StartTrace());
  SLUICE_ASSIGN_OR_RETURN(const TrafficRun traced, run());
  StepTrace steps;
  steps.begin = traced.begin;
  steps.end = traced.end;
  SLUICE_ASSIGN_OR_RETURN(steps.device, seen->Stop());
  out.idle_share = IdleShare(steps);
  return out;
}

}  // namespace sluice::bench
