// Grouped products with e4m3 weights and block scales. They move nk bytes of W, and its scales,
// and 2k + 4n of each row. Floor: those bytes over the memory's rate.
#include "kernels/cuda/linear/grouped_product.cuh"

namespace sluice::kernels::cuda {

cudaError_t LaunchTiledProductFp8(const GroupedProduct& p, cudaStream_t stream) {
  return LaunchTiledProduct<Fp8Weights>(p, stream);
}

}  // namespace sluice::kernels::cuda
