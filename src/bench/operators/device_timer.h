// Times work that is recorded once on a device and replayed, by the device's clock.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "src/base/timing.h"
#include "src/device/device.h"

namespace sluice::bench {

class DeviceTimer {
 public:
  // `seconds`: time spent on each figure, but at least 5 replays and at most 200.
  DeviceTimer(Device& device, double seconds);

  // Returns the times of a replay of what `enqueue` puts on a stream. `before`, if given, is called
  // before each replay, and what it enqueues is not timed. Returns the device's errors.
  absl::StatusOr<Timing> Time(const std::function<void(Stream&)>& enqueue,
                              const std::function<void(Stream&)>& before = nullptr);

 private:
  Device& device_;
  const double seconds_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<TimedEvent> begin_, end_;
};

}  // namespace sluice::bench
