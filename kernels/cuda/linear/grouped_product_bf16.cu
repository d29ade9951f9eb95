// Grouped products with bf16 weights. They move 2nk bytes of W and 2k + 4n (2n) of each row.
// Floor: those bytes over the memory's rate.
#include "kernels/cuda/linear/grouped_product.cuh"

namespace sluice::kernels::cuda {

cudaError_t LaunchTiledProductBf16(const GroupedProduct& p, cudaStream_t stream) {
  return LaunchTiledProduct<Bf16Weights>(p, stream);
}

}  // namespace sluice::kernels::cuda
