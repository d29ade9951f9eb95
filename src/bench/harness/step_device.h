// A device whose steps a bench records in its own way: in two versions, of which each step runs
// one, or not recorded at all.
#pragma once

#include <memory>

#include "src/device/device.h"

namespace sluice::bench {

struct StepDeviceOptions {
  // Every program is recorded twice, with this false and with this true; a run uses the value that
  // it has then. So steps of both kinds can follow one another under the same engine. Null: the
  // device records as usual. Used on the engine's thread.
  bool* version = nullptr;
  // False: steps are enqueued operator by operator, unpadded.
  bool record = true;
};

// Returns a device that forwards everything else to `device`, which outlives the result.
std::unique_ptr<Device> NewStepDevice(Device* device, const StepDeviceOptions& options);

}  // namespace sluice::bench
