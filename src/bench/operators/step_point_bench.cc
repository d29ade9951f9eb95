// sluice-bench kernels --only step: times the operators of a decode step of a DeepSeek-V3.2 rank at
// many amounts of work, for sluice-bench simulate.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/operators/device_operands.h"
#include "src/bench/operators/device_timer.h"
#include "src/bench/operators/kernel_bench.h"
#include "src/bench/operators/step_points.h"
#include "src/bench/simulate/operator_times.h"
#include "src/device/kernel_set.h"
#include "src/model/latent_caches.h"

namespace sluice::bench {
namespace {

constexpr int64_t kBlockTokens = 64;  // Tokens of a page; contexts are whole pages.
constexpr double kTranslatedBytes = 65536, kEntryBytes = 656;

class StepPointBench {
 public:
  StepPointBench(const StepPointOptions& options, Report report)
      : options_(options), out_(options.json), report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_RETURN_IF_ERROR(Load());
    out_.Print(absl::StrFormat("%s\n%-26s %-36s %10s %10s %19s\n", Preamble(report_), "operator",
                               "count of", "count", "us", "10th-90th"));
    DeviceTimer timer(bench_device_->device(), options_.seconds);
    const TimePoint time = [&](const StepPoint& point) { return Measure(timer, point); };
    Device& device = bench_device_->device();
    SLUICE_RETURN_IF_ERROR(TimeProducts(device, shape_, time));
    SLUICE_RETURN_IF_ERROR(TimeSmallOperators(device, shape_, time));
    SLUICE_RETURN_IF_ERROR(TimeLatentAttention(device, shape_, time));
    SLUICE_RETURN_IF_ERROR(TimePools(device, shape_, time));
    SLUICE_RETURN_IF_ERROR(AddConstants(timer));
    report_.details["operator_times"] = times_->Json();
    return out_.Finish(report_);
  }

 private:
  absl::Status Load() {
    SLUICE_ASSIGN_OR_RETURN(shape_.config, LoadModelConfig(options_.model));
    const ModelConfig& config = shape_.config;
    if (!config.latent.has_value() || !config.latent->indexer.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(options_.model, ": --only step needs latent caches and an indexer, found ",
                       config.architecture));
    }
    // Errors name what packed entries need.
    SLUICE_RETURN_IF_ERROR(LatentCacheLayout(config, DType::kFloat8E4M3, kBlockTokens).status());
    shape_.rows = options_.rows;
    shape_.contexts = options_.contexts;
    shape_.misses = options_.misses;
    for (std::vector<int64_t>* list : {&shape_.rows, &shape_.contexts, &shape_.misses}) {
      std::sort(list->begin(), list->end());
    }
    shape_.sequences = options_.sequences;
    shape_.home_bytes = static_cast<int64_t>(options_.home_gib * 1024 * 1024 * 1024);
    if (options_.device == "cpu") shape_.cold_bytes = 1;
    const int64_t least = 4 * shape_.top_k();
    for (const int64_t context : shape_.contexts) {
      if (context >= least && context % kBlockTokens == 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--contexts takes multiples of ", kBlockTokens, " from ", least,
                       " up, four times what a row selects, found ", context));
    }
    if (shape_.misses.back() > shape_.top_k()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--misses takes at most the ", shape_.top_k(), " entries of a selection"));
    }
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, "auto", options_.threads}));
    for (auto& entry : bench_device_->Shape()) {
      absl::StrAppend(&machine_, machine_.empty() ? "" : ", ", entry.first, " ", entry.second);
      report_.shape.push_back(std::move(entry));
    }
    times_ = OperatorTimes::Of(machine_, config);
    return absl::OkStatus();
  }

  absl::Status Measure(DeviceTimer& timer, const StepPoint& point) {
    if (!absl::StrContains(point.name, options_.match)) return absl::OkStatus();
    SLUICE_ASSIGN_OR_RETURN(Timing t, timer.Time(
                                          [&](Stream& stream) {
                                            for (int i = 0; i < point.launches; ++i) {
                                              point.launch(stream, i);
                                            }
                                          },
                                          point.before));
    for (double* seconds : {&t.median, &t.low, &t.high}) *seconds /= point.launches * point.parts;
    const double us = t.median * 1e6;
    report_.figures.push_back(
        SecondsFigure(absl::StrCat(point.name, ", ", point.axis, " ", point.count), t));
    out_.Print(absl::StrFormat("%-26s %-36s %10.0f %10.2f %9.2f-%-9.2f\n", point.name, point.axis,
                               point.count, us, t.low * 1e6, t.high * 1e6));
    if (point.name == "transfer.far") {
      far_us_ = us;
    } else {
      times_->AddPoint(point.name, point.axis, "this run", point.count, us);
      if (point.name == "transfer") near_us_[point.count] = us;
    }
    return absl::OkStatus();
  }

  absl::Status AddConstants(DeviceTimer& timer) {
    SLUICE_ASSIGN_OR_RETURN(const double fork, ForkAndJoin(timer));
    times_->AddConstant("fork_join_us", fork, "this run: norms on a branch less norms in a row");
    const char* const pages = "an H200, kernels/cuda; not measured by this command";
    const double misses = static_cast<double>(std::min(kFarMisses, shape_.top_k()));
    const double each =
        static_cast<double>(shape_.contexts.front()) * kEntryBytes / kTranslatedBytes;
    const auto near = near_us_.find(static_cast<double>(shape_.sequences) * misses);
    if (far_us_ > 0 && near != near_us_.end()) {
      const double touched = static_cast<double>(shape_.sequences) * each *
                             (1 - std::pow(1 - 1 / std::max(each, 1.0), misses));
      times_->AddConstant("translation_us", std::max(far_us_ - near->second, 0.0) / touched,
                          "this run: far homes less near ones, for each 64 KiB");
    } else {
      times_->AddConstant("translation_us", 0.012, pages);
    }
    times_->AddConstant("step_gap_us", 23, pages);
    times_->AddConstant("beside_attention", 0.65, pages);
    times_->AddConstant("transfer_processors", 4, "ess_transfer_workers");
    times_->AddConstant("processors", 132, pages);
    times_->AddConstant("layer_overhead_us", 6.5, "fitted on measured steps of an H200");
    return absl::OkStatus();
  }

  // Returns the microseconds that two branches with a norm each take more than two norms in a row.
  absl::StatusOr<double> ForkAndJoin(DeviceTimer& timer) {
    constexpr int kTimes = 64;
    Device& device = bench_device_->device();
    DeviceOperands operands(device);
    const int32_t dim = shape_.config.hidden_size;
    const auto count = static_cast<size_t>(dim);
    kernels::RmsNormParams p{};
    p.x = operands.Put(std::vector<float>(count));
    p.weight = p.x;
    void* const outs[2] = {operands.Activations(dim), operands.Activations(dim)};
    p.x_stride = p.dim = dim;
    p.rows = 1;
    p.epsilon = 1e-6f;
    p.out_type = device.kernels().activation_type();
    SLUICE_RETURN_IF_ERROR(operands.status());
    double us[2];
    for (const bool forks : {false, true}) {
      SLUICE_ASSIGN_OR_RETURN(const Timing t, timer.Time([&](Stream& stream) {
        for (int i = 0; i < kTimes; ++i) {
          Stream& other = forks ? stream.Branch(0) : stream;
          if (forks) other.After(stream);
          p.out = outs[0];
          device.kernels().RmsNorm(other, p);
          p.out = outs[1];
          device.kernels().RmsNorm(stream, p);
          if (forks) stream.After(other);
        }
      }));
      us[forks ? 1 : 0] = t.median * 1e6 / kTimes;
    }
    // The norm on the branch is hidden, and its time comes on top of the difference.
    return std::max(us[1] - us[0] / 2, 0.0);
  }

  const StepPointOptions options_;
  const Output out_;
  Report report_;
  StepPointShape shape_;
  std::string machine_;
  std::unique_ptr<BenchDevice> bench_device_;
  std::optional<OperatorTimes> times_;
  std::map<double, double> near_us_;  // By entries.
  double far_us_ = 0;
};

}  // namespace

int RunStepPointBench(const StepPointOptions& options, Report report) {
  const absl::StatusOr<int> status = StepPointBench(options, std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
