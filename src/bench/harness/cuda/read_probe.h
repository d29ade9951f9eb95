// The read ceiling of a GPU. No CUDA headers.
#pragma once

#include <cstddef>
#include <string>

namespace sluice::bench {

// Bytes per second at which a kernel that only reads gets through `bytes` bytes, launch after
// launch the next piece of `window` bytes of device memory at `data`, over and over: the median of
// some. 0: it did not run. REQUIRES: 0 < window, bytes.
double CudaReadRate(const void* data, size_t window, size_t bytes);

// "NVIDIA H100 80GB HBM3".
std::string CudaGpuName();

}  // namespace sluice::bench
