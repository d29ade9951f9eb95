// The CPU device: "HBM" is ordinary memory with huge pages, a stream is an ordered queue with a
// thread of its own, and an operator runs on that thread together with the device's team of
// helpers.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/device/device.h"

namespace sluice {

struct CpuDeviceOptions {
  // "auto": the best path of this processor; or a name of kernels/kernel_table.h.
  std::string kernels = "auto";
  // Threads that compute, the compute stream's own included. 0: one per core that this process may
  // use.
  int threads = 0;
};

// INVALID_ARGUMENT if the kernels are unknown or this processor lacks them; the message lists those
// that it has.
absl::StatusOr<std::unique_ptr<Device>> NewCpuDevice(const CpuDeviceOptions& options);

// Cores that this process may use.
int AvailableCores();

}  // namespace sluice
