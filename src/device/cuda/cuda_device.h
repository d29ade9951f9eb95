// The CUDA device: one NVIDIA GPU of compute capability 9.0 (H100, H200). HBM comes from
// cudaMalloc, streams and events are CUDA's, a Program is an instantiated graph. This header needs
// no CUDA headers.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/device.h"

namespace sluice {

// Opens the first GPU that CUDA_VISIBLE_DEVICES shows. FAILED_PRECONDITION, in one sentence that
// names what was found, what is needed and the remedy: no driver, a driver that is too old, no GPU,
// a GPU of another compute capability, or no cuBLASLt.
absl::StatusOr<std::unique_ptr<Device>> NewCudaDevice();

// Returns OK where NewCudaDevice finds a GPU that it can use, else the error that it would return.
// Leaves nothing on the GPU.
absl::Status CheckCudaDevice();

}  // namespace sluice
