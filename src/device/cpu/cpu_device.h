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
  // "auto": the best path of this processor; else a name of kernels/kernel_table.h.
  std::string kernels = "auto";
  // Number of threads that compute, the compute stream's own included. 0: DefaultThreads().
  int threads = 0;
  // Tests of padded steps set this: a step of decode rows is padded to a multiple of it. 0: no step
  // is padded, since on a CPU a padded row costs as much as any other row.
  int row_bucket = 0;
};

// INVALID_ARGUMENT if the kernels are unknown or this processor lacks them; the message lists those
// that it has.
absl::StatusOr<std::unique_ptr<Device>> NewCpuDevice(const CpuDeviceOptions& options);

// Returns the number of cores that this process may use.
int AvailableCores();

// Returns one thread per core, but from four cores on leaves one core to the engine and gRPC: an
// operator waits for its slowest worker, and a worker that has to share its core makes every step
// three times as long (16 cores: 6.5 ms a step with 16 threads, 1.9 with 15; sluice-bench step).
int DefaultThreads();

}  // namespace sluice
