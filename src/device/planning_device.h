// A device that counts the bytes it is asked for and takes no memory. The objects of a node are
// made on it as on a real device, so that a memory plan says what the node will take.
#pragma once

#include <memory>
#include <string>

#include "src/device/device.h"

namespace sluice {

// Pinned memory may be used and takes memory when it is touched. Memory of kind kDevice must not be
// touched. Enqueued operations do nothing, workers do not run, and every event is ready.
class PlanningDevice : public Device {
 public:
  // Returns the bytes asked for so far.
  virtual int64_t asked(MemoryKind kind) const = 0;
};

// Returns a device whose scratch sizes and form of weights are those of `real`, which outlives it.
std::unique_ptr<PlanningDevice> NewPlanningDevice(Device* real);

}  // namespace sluice
