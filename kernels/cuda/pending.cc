// Operators without a kernel yet. Whoever writes one takes its line out of here.
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {

cudaError_t LaunchSparseMla(const SparseMlaParams&, cudaStream_t) { return cudaErrorNotSupported; }
int64_t SparseMlaScratchBytes(int32_t, int32_t, int32_t, int64_t) { return 0; }

}  // namespace sluice::kernels::cuda
