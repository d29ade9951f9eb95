// A device that notes what it is asked for and gives none of it: the objects of a node are made on
// it as on a real one, so that a plan of memory is what the node will take.
#pragma once

#include <memory>
#include <string>

#include "src/device/device.h"

namespace sluice {

// Pinned memory is there, but takes none until it is touched; memory of kind kDevice must not be.
// Nothing that is enqueued happens, no worker works, and every event is ready.
class PlanningDevice : public Device {
 public:
  // Bytes asked for so far.
  virtual int64_t asked(MemoryKind kind) const = 0;
};

// Scratch and the form of weights are those of `real`, which outlives it.
std::unique_ptr<PlanningDevice> NewPlanningDevice(Device* real);

}  // namespace sluice
