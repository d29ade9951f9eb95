// The CRC-32C of memory that a GPU reads, by the rules of launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::kernels::cuda {

// Adds the CRC-32C of `bytes` bytes to *crc by exclusive or, so that *crc must be 0 for the
// checksum to be there. `data` has any alignment; a whole number of words at an aligned address is
// fast.
cudaError_t LaunchCrc32c(const void* data, int64_t bytes, uint32_t* crc, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
