// The simulated device: host memory and the CPU's operators, on a virtual clock. Every command of a
// stream takes a time drawn from the seed, and a copy of many pieces lands them in any order. Its
// faults come from the seed too: streams that stall, an allocation that is refused. One thread runs
// everything, so a run is a function of the seed.
//
// A stream's branches are streams of their own: commands that nothing puts in order happen in any
// order.
//
// A command touches memory either when it begins or when it ends (drawn as well): code that gives
// memory back too early, or reads it too soon, meets both.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "kernels/kernel_table.h"
#include "src/device/device.h"
#include "src/device/sim/sim_clock.h"

namespace sluice {

class SimRanks;

struct SimDeviceOptions {
  // The operators: a table of kernels/kernel_table.h or one of the caller's. It must live as long
  // as the device.
  const kernels::KernelTable* kernels = nullptr;
  uint64_t seed = 0;
  // Mean times: a command takes between zero and twice as long.
  absl::Duration kernel_time = absl::Microseconds(50);
  absl::Duration copy_time = absl::Microseconds(50);
  // The share of the commands that take `stall` more.
  double stall_share = 0;
  absl::Duration stall = absl::ZeroDuration();
  // The number of the Allocate that is refused, counted from 0; -1: none is.
  int refused_allocation = -1;
  // A step of decode rows is padded to a multiple of this many; 0: no step is padded.
  int row_bucket = 0;
  // The shares of the rounds in which a worker of a team (src/device/worker_team.h) reports a
  // failure, is past the deadline, and leaves for good.
  double worker_failures = 0;
  double late_workers = 0;
  double leaving_workers = 0;
  // Breaches of the Device contract, for tests of the code that must notice them: the share of
  // events that are ready before their point is reached, and of copies that never happen.
  double early_events = 0;
  double lost_copies = 0;
  // The ranks that the device may join (src/device/sim/sim_ranks.h), all on its clock. They outlive
  // the device.
  SimRanks* ranks = nullptr;
};

class SimDevice : public Device {
 public:
  virtual uint64_t stalls() const = 0;  // stalled commands so far
};

// `clock` outlives the device.
std::unique_ptr<SimDevice> NewSimDevice(const SimDeviceOptions& options, SimClock* clock);

}  // namespace sluice
