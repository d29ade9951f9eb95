// Describes the GPUs that CUDA finds on this machine, and tells whether Sluice can run on them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "src/device/host_placement.h"

namespace sluice {

struct CudaMachine {
  int driver_version = 0;   // CUDA version that the driver supports, 13000 for 13.0; 0: no driver
  int runtime_version = 0;  // CUDA version that this program was built with
  int gpus = 0;
  std::string error;  // why the driver could not count GPUs; empty: it could
  std::string gpu;    // name of the first GPU, "NVIDIA H100 80GB HBM3"
  int major = 0;      // compute capability of the first GPU
  int minor = 0;
};

// Asks the driver. Leaves nothing on a GPU. Comes before every other call of CUDA, and before other
// threads read the environment: it sets CUDA_DEVICE_MAX_CONNECTIONS, unless that is set.
CudaMachine ProbeCudaMachine();

// Returns OK, or FAILED_PRECONDITION: one sentence with what was found, what is needed and the
// remedy.
absl::Status CheckCudaMachine(const CudaMachine& machine);

// Returns where the GPU is attached to the host. The first call asks the system, and logs a host
// that has several NUMA nodes and does not tell the GPU's.
const HostPlacement& GpuPlacement();

}  // namespace sluice
