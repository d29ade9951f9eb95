// The CUDA operators as one more path of the kernel tests.
#pragma once

#include <cstddef>
#include <string>

#include "kernels/kernel_table.h"

namespace sluice::kernels {

// Returns the path "cuda": each function launches its operator once (for worker 0) and waits for
// it. Returns null if this build has no CUDA or this machine no GPU; then `*why` says which.
const KernelTable* CudaPath(std::string* why);

// Returns memory that every path can read and write: pinned and mapped if there is a GPU, 64-byte
// aligned.
void* AllocateForPaths(size_t bytes);
void FreeForPaths(void* data);

}  // namespace sluice::kernels
