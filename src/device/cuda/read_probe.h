// Measures the read ceiling of a GPU. This header includes no CUDA headers.
#pragma once

#include <cstddef>
#include <string>

namespace sluice {

// Returns the bytes per second at which a kernel that only reads gets through `bytes` bytes: each
// launch reads the next piece of the `window` bytes of device memory at `data`, over and over, and
// the result is the median of several rounds. Returns 0 if the probe did not run. REQUIRES: 0 <
// window, bytes.
double CudaReadRate(const void* data, size_t window, size_t bytes);

// Returns the GPU's name, such as "NVIDIA H100 80GB HBM3".
std::string CudaGpuName();

}  // namespace sluice
