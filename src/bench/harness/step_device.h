// The device of an engine whose steps a bench wants otherwise than a device records them: in two
// versions, of which each step runs one, or not recorded at all.
#pragma once

#include <memory>

#include "src/device/device.h"

namespace sluice::bench {

struct StepDeviceOptions {
  // Whatever is recorded is recorded with this false and with it true, and a run takes what it is
  // then: two versions of a step under the same engine, so that steps of either kind can follow one
  // another. Null: as the device does it. Engine's thread.
  bool* version = nullptr;
  // False: steps are enqueued operator by operator, unpadded.
  bool record = true;
};

// Everything else is `device`'s, which outlives the result.
std::unique_ptr<Device> NewStepDevice(Device* device, const StepDeviceOptions& options);

}  // namespace sluice::bench
