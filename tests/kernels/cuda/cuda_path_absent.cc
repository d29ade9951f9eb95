// The stand-in of cuda_path.cc in a build without nvcc.
#include <new>

#include "tests/kernels/cuda/cuda_path.h"

namespace sluice::kernels {

const KernelTable* CudaPath(std::string* why) {
  *why = "this build has no CUDA";
  return nullptr;
}

void* AllocateForPaths(size_t bytes) { return ::operator new(bytes, std::align_val_t(64)); }

void FreeForPaths(void* data) { ::operator delete(data, std::align_val_t(64)); }

}  // namespace sluice::kernels
