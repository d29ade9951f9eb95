#include "src/bench/operators/device_timer.h"

#include <vector>

#include "absl/time/time.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

constexpr int kLeastSamples = 5, kMostSamples = 200;

}  // namespace

DeviceTimer::DeviceTimer(Device& device, double seconds)
    : device_(device),
      seconds_(seconds),
      stream_(device.NewStream(Device::StreamKind::kCompute)),
      begin_(device.NewTimedEvent()),
      end_(device.NewTimedEvent()) {}

absl::StatusOr<Timing> DeviceTimer::Time(const std::function<void(Stream&)>& enqueue,
                                         const std::function<void(Stream&)>& before) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Program> program,
                          device_.Record(*stream_, enqueue));
  std::vector<double> seconds;
  double sum = 0;
  for (int i = -1; i < kMostSamples && (i < kLeastSamples || sum < seconds_); ++i) {
    if (before != nullptr) before(*stream_);
    stream_->Record(*begin_);
    program->Run(*stream_);
    stream_->Record(*end_);
    end_->Wait();
    SLUICE_RETURN_IF_ERROR(device_.Health());
    if (i < 0) continue;
    seconds.push_back(absl::ToDoubleSeconds(end_->Since(*begin_)));
    sum += seconds.back();
  }
  return TimingOf(std::move(seconds));
}

}  // namespace sluice::bench
