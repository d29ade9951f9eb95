// sluice-bench kernels --only policies: times the operators that sparse policies add to a step on a
// device, each as a step launches it.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/operators/device_timer.h"
#include "src/bench/operators/kernel_bench.h"
#include "src/bench/operators/policy_operators.h"

namespace sluice::bench {
namespace {

constexpr int kLaunches = 24;       // Launches in a recording.
constexpr int kLongLaunches = 2;    // Launches in a recording if each one is long.
constexpr double kLongBytes = 5e7;  // Bytes over the link that make a launch long.
constexpr size_t kLinkBytes = 256 << 20;
constexpr size_t kLeastProbe = 8 << 20;  // Below this size a rate measures launches.

// Returns the bytes per second from pinned memory to the device's memory.
absl::StatusOr<double> LinkRate(Device& device, DeviceTimer& timer) {
  SLUICE_ASSIGN_OR_RETURN(const Buffer from,
                          device.Allocate(MemoryKind::kPinned, kLinkBytes, "the link's probe"));
  SLUICE_ASSIGN_OR_RETURN(const Buffer to,
                          device.Allocate(MemoryKind::kDevice, kLinkBytes, "the link's probe"));
  SLUICE_ASSIGN_OR_RETURN(const Timing t, timer.Time([&](Stream& stream) {
    stream.Copy(to.data(), from.data(), kLinkBytes);
  }));
  return static_cast<double>(kLinkBytes) / t.median;
}

class PolicyOperatorBench {
 public:
  PolicyOperatorBench(const PolicyBenchOptions& options, Report report)
      : options_(options), out_(options.json), report_(std::move(report)) {}

  absl::StatusOr<int> Run() {
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, "auto", options_.threads}));
    Device& device = bench_device_->device();
    for (auto& entry : bench_device_->Shape()) report_.shape.push_back(std::move(entry));
    out_.Print(Preamble(report_));
    DeviceTimer timer(device, options_.seconds);
    SLUICE_ASSIGN_OR_RETURN(link_rate_, LinkRate(device, timer));
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<PolicyOperators> operators,
                            PolicyOperators::Create(device, options_.shape));
    out_.Print(absl::StrFormat("\nlink %.1f GB/s\n%-44s %9s %19s %8s %8s %9s %8s\n",
                               link_rate_ * 1e-9, "operator", "us", "10th-90th", "MB", "link MB",
                               "floor us", "of floor"));
    for (const PolicyOperator& one : operators->all()) {
      if (!absl::StrContains(one.name, options_.match)) continue;
      SLUICE_RETURN_IF_ERROR(Measure(timer, one));
    }
    return out_.Finish(report_);
  }

 private:
  absl::Status Measure(DeviceTimer& timer, const PolicyOperator& one) {
    const int launches = one.link_bytes > kLongBytes ? kLongLaunches : kLaunches;
    SLUICE_ASSIGN_OR_RETURN(Timing t, timer.Time([&](Stream& stream) {
      for (int i = 0; i < launches; ++i) one.launch(stream, i);
    }));
    for (double* seconds : {&t.median, &t.low, &t.high}) *seconds /= launches;
    SLUICE_ASSIGN_OR_RETURN(
        const double read_rate,
        bench_device_->ReadRate(std::max(kLeastProbe, static_cast<size_t>(one.bytes))));
    const double floor = std::max(one.bytes / read_rate, one.link_bytes / link_rate_);
    Figure f = SecondsFigure(one.name, t);
    f.more = {{"bytes", one.bytes},
              {"link_bytes", one.link_bytes},
              {"read_bytes_per_second", read_rate},
              {"link_bytes_per_second", link_rate_},
              {"floor_seconds", floor},
              {"of_floor", floor / t.median}};
    report_.figures.push_back(std::move(f));
    out_.Print(absl::StrFormat("%-44s %9.2f %9.2f-%-9.2f %8.2f %8.2f %9.2f %7.0f%%\n", one.name,
                               t.median * 1e6, t.low * 1e6, t.high * 1e6, one.bytes * 1e-6,
                               one.link_bytes * 1e-6, floor * 1e6, 100 * floor / t.median));
    return absl::OkStatus();
  }

  const PolicyBenchOptions options_;
  const Output out_;
  Report report_;
  std::unique_ptr<BenchDevice> bench_device_;
  double link_rate_ = 0;
};

}  // namespace

int RunPolicyOperatorBench(const PolicyBenchOptions& options, Report report) {
  const absl::StatusOr<int> status = PolicyOperatorBench(options, std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
