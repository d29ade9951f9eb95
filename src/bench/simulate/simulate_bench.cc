// sluice-bench simulate: forecasts of decode steps by batch.
#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "src/attention/policy_profile.h"
#include "src/base/status_macros.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/simulate/capacity.h"
#include "src/bench/simulate/misses.h"
#include "src/bench/simulate/operator_times.h"
#include "src/bench/simulate/simulate_options.h"
#include "src/bench/simulate/step_model.h"

namespace sluice::bench {
namespace {

double MeanOf(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

class Simulation {
 public:
  Simulation(const SimulateOptions& options, Report report)
      : options_(options), out_(options.json), report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    out_.Print(Preamble(report_));
    out_.Print(absl::StrCat("operators ", times_->machine(), "\n"));
    for (const int64_t context : options_.contexts) {
      full_ = 0;
      PrintHead(context);
      for (const std::string& policy : options_.policies) {
        SLUICE_RETURN_IF_ERROR(RunPolicy(policy, context));
      }
    }
    report_.details["forecast"] = true;
    report_.details["operators"] = {{"file", options_.operators}, {"machine", times_->machine()}};
    if (!extrapolated_.empty()) {
      out_.Print(absl::StrCat("\noutside what was measured, along the last line: ",
                              absl::StrJoin(extrapolated_, ", "), "\n"));
    }
    return out_.Finish(report_);
  }

 private:
  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(config_, LoadModelConfig(options_.model));
    SLUICE_ASSIGN_OR_RETURN(times_, OperatorTimes::Read(options_.operators));
    SLUICE_RETURN_IF_ERROR(times_->CheckGeometry(config_));
    for (const auto& [prefix, factor] : options_.scales) times_->Scale(prefix, factor);
    for (const auto& [name, value] : options_.constants) times_->SetConstant(name, value);
    report_.shape = {{"model", config_.name},
                     {"ratio", absl::StrCat(options_.ratio)},
                     {"misses", options_.misses},
                     {"drafts", absl::StrCat(options_.drafts)},
                     {"acceptance", absl::StrCat(options_.acceptance)},
                     {"two_batch", options_.parallel.two_batch ? "yes" : "no"},
                     {"all_to_all_us", absl::StrCat(options_.parallel.all_to_all_us, " + ",
                                                    options_.parallel.all_to_all_row_us, " a row")},
                     {"hbm_bytes", absl::StrCat(options_.hbm_bytes)},
                     {"dram_bytes", absl::StrCat(options_.dram_bytes)}};
    return absl::OkStatus();
  }

  void PrintHead(int64_t context) const {
    out_.Print(absl::StrFormat(
        "\nforecast, context %d\n%-6s %7s %6s %8s %9s %7s %7s %6s %8s %8s %8s %8s %8s %6s  %-9s "
        "%s\n",
        context, "policy", "batch", "rows", "ms", "tokens/s", "x full", "misses", "GB", "products",
        "experts", "attend", "indexer", "transfer", "rest", "layers", "longest"));
  }

  absl::Status RunPolicy(const std::string& policy, int64_t context) {
    CapacityAsk ask;
    ask.ess = policy == "ess";
    ask.context = context + options_.answer_tokens;
    ask.ratio = options_.ratio;
    ask.least_places = options_.least_places;
    ask.draft_layers = options_.drafts > 0 ? 1 : 0;
    ask.block_tokens = static_cast<int>(options_.block_tokens);
    ask.hbm_bytes = options_.hbm_bytes;
    ask.dram_bytes = options_.dram_bytes;
    SLUICE_ASSIGN_OR_RETURN(const Capacity capacity, CapacityOf(config_, ask));
    const bool limited = options_.hbm_bytes > 0;
    if (limited && capacity.sequences == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          policy, ": a sequence of ", ask.context, " tokens takes ", capacity.hbm_bytes_each,
          " bytes of HBM and ", capacity.dram_bytes_each, " of DRAM, which is more than there is"));
    }
    std::vector<int64_t> batches = options_.batches;
    if (batches.empty()) batches = {capacity.sequences};
    StepShape shape;
    shape.ess = ask.ess;
    shape.context = context;
    shape.drafts = static_cast<int>(options_.drafts);
    shape.places = capacity.places;
    shape.whole = capacity.whole;
    shape.schedule = options_.schedule;
    shape.skip_transfers = options_.skip_transfers;
    shape.link_bytes_per_s = options_.link_gb_per_s * 1e9;
    shape.parallel = options_.parallel;
    for (const int64_t batch : batches) {
      if (limited && batch > capacity.sequences) {
        out_.Print(absl::StrFormat("%-6s %7d  does not fit: %s holds %d\n", policy, batch,
                                   capacity.bound, capacity.sequences));
        continue;
      }
      shape.sequences = static_cast<int>(batch);
      SLUICE_RETURN_IF_ERROR(FindMisses(&shape));
      SLUICE_ASSIGN_OR_RETURN(const StepForecast forecast,
                              SimulateStep(config_, *times_, options_.extrapolate, shape));
      Tell(policy, shape, limited ? &capacity : nullptr, forecast);
    }
    return absl::OkStatus();
  }

  // Sets shape->misses. Draws and profiles' points do not depend on how the batch is divided.
  absl::Status FindMisses(StepShape* shape) {
    if (!shape->ess || shape->whole) return absl::OkStatus();
    SLUICE_ASSIGN_OR_RETURN(shape->misses, ParseMisses(options_.misses));
    if (!shape->misses.empty()) return absl::OkStatus();
    if (options_.misses == "drawn") {
      if (drawn_context_ != shape->context) {
        DrawnSelections draw;
        draw.context = shape->context;
        draw.places = shape->places;
        draw.top_k = config_.latent->indexer->top_k;
        draw.rows = 1 + shape->drafts;
        SLUICE_ASSIGN_OR_RETURN(const std::vector<double> by_path, DrawnMisses(draw));
        drawn_ = MissesByLayer(by_path, config_.layers);
        drawn_context_ = shape->context;
      }
      shape->misses = drawn_;
      return absl::OkStatus();
    }
    SLUICE_ASSIGN_OR_RETURN(const PolicyProfile profile, ReadPolicyProfile(options_.misses));
    const MissProfile::Point* const point =
        profile.misses.Nearest(shape->context, options_.ratio, shape->sequences);
    if (point == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(options_.misses, ": the profile has no misses (sluice-profile --ratios)"));
    }
    shape->misses = point->by_layer;
    return absl::OkStatus();
  }

  void Tell(const std::string& policy, const StepShape& shape, const Capacity* capacity,
            const StepForecast& step) {
    const double tokens = TokensOfStep(shape.drafts, options_.acceptance) * shape.sequences;
    const double rate = tokens / step.us * 1e6;
    if (policy == "full") full_ = rate;
    const double over = full_ > 0 ? rate / full_ : 0;
    const double misses = MeanOf(shape.misses);
    const bool most = capacity != nullptr && shape.sequences == capacity->sequences;
    Print(policy, shape, step, rate, over, most ? capacity->bound : "");
    const std::string name =
        absl::StrCat(policy, ", context ", shape.context, ", batch ", shape.sequences);
    Figure f = SecondsFigure(absl::StrCat(name, ", step"), {});
    f.median = f.low = f.high = step.us * 1e-6;
    f.more = {{"rows", shape.rows()},
              {"misses", misses},
              {"link_bytes", step.link_bytes},
              {"transfer_seconds", step.transfer_us * 1e-6},
              {"over_full", over}};
    for (const auto& [part, us] : step.parts) f.more.emplace_back(part, us * 1e-6);
    report_.figures.push_back(std::move(f));
    Figure r;
    r.name = absl::StrCat(name, ", tokens per second");
    r.unit = "1/s";
    r.median = r.low = r.high = rate;
    report_.figures.push_back(std::move(r));
    extrapolated_.insert(step.extrapolated.begin(), step.extrapolated.end());
    report_.details["steps"].push_back({{"policy", policy},
                                        {"context", shape.context},
                                        {"batch", shape.sequences},
                                        {"rows", shape.rows()},
                                        {"step_seconds", step.us * 1e-6},
                                        {"tokens_per_second", rate},
                                        {"over_full", over},
                                        {"misses", shape.misses},
                                        {"schedules", step.schedules},
                                        {"longest", step.longest()},
                                        {"bound", most ? capacity->bound : ""},
                                        {"parts_us", step.parts},
                                        {"extrapolated", step.extrapolated}});
  }

  void Print(const std::string& policy, const StepShape& shape, const StepForecast& step,
             double rate, double over, const std::string& bound) const {
    double rest = 1;
    const auto share = [&](const char* part) {
      const auto at = step.parts.find(part);
      const double of = at == step.parts.end() ? 0 : at->second / step.us;
      rest -= of;
      return absl::StrFormat("%.0f %%", 100 * of);
    };
    const std::string shares =
        absl::StrFormat("%8s %8s %8s %8s %8s", share("products"), share("experts"),
                        share("attention"), share("indexer"), share("transfer"));
    out_.Print(absl::StrFormat(
        "%-6s %7s %6d %8.2f %9.0f %7s %7.0f %6.2f %s %4.0f %%  %-9s %s%s\n", policy,
        absl::StrCat(shape.sequences, bound.empty() ? "" : "*"), shape.rows(), step.us * 1e-3, rate,
        over > 0 ? absl::StrFormat("%.2f", over) : "", MeanOf(shape.misses), step.link_bytes * 1e-9,
        shares, 100 * rest, shape.ess ? absl::StrJoin(step.schedules, "/") : "", step.longest(),
        bound.empty() ? "" : absl::StrCat("; ", bound)));
  }

  const SimulateOptions options_;
  const Output out_;
  Report report_;
  ModelConfig config_;
  std::optional<OperatorTimes> times_;
  double full_ = 0;  // Tokens/s of full at its last batch of this context.
  int64_t drawn_context_ = 0;
  std::vector<double> drawn_;
  std::set<std::string> extrapolated_;
};

}  // namespace

int RunSimulate(const Invocation& invocation) {
  SimulateOptions options;
  if (const auto status = ReadSimulateOptions(invocation, &options)) return *status;
  const absl::StatusOr<int> status = Simulation(options, NewReport("simulate", invocation)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
