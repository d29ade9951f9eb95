// What a machine offers CUDA, and whether it will do.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "src/device/host_placement.h"

namespace sluice {

struct CudaMachine {
  int driver_version = 0;   // CUDA version that the driver supports, 13000 for 13.0; 0: no driver
  int runtime_version = 0;  // that this program was built with
  int gpus = 0;
  std::string error;  // what kept the driver from counting GPUs; empty: nothing
  std::string gpu;    // name of the first, "NVIDIA H100 80GB HBM3"
  int major = 0;      // its compute capability
  int minor = 0;
};

// Asks the driver. Nothing is left behind on a GPU.
CudaMachine ProbeCudaMachine();

// OK, or FAILED_PRECONDITION: one sentence with what was found, what is needed and the remedy.
absl::Status CheckCudaMachine(const CudaMachine& machine);

// Where the GPU is attached to the host. Asked of the system once; a host that has several NUMA
// nodes and tells none for the GPU is logged then.
const HostPlacement& GpuPlacement();

}  // namespace sluice
