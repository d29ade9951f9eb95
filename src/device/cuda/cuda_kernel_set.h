// The KernelSet over kernels/cuda.
#pragma once

#include <memory>

#include "src/device/cuda/cuda_stream.h"
#include "src/device/kernel_set.h"

namespace sluice {

// `health` outlives the kernel set.
std::unique_ptr<KernelSet> NewCudaKernelSet(DeviceHealth* health);

}  // namespace sluice
