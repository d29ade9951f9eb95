// Products with weights in bf16, by groups: 2nk bytes of W, 2k + 4n (2n) of each row. Floor: those
// bytes over the memory's rate.
#include "kernels/cuda/grouped_product.cuh"

namespace sluice::kernels::cuda {

cudaError_t LaunchTiledProductBf16(const GroupedProduct& p, cudaStream_t stream) {
  const int rows = TypicalRows(p);
  if (rows <= 8) return LaunchTiles<Bf16Weights, 8, 2>(p, stream);
  if (rows <= 32) return LaunchTiles<Bf16Weights, 32, 2>(p, stream);
  if (rows <= 64) return LaunchTiles<Bf16Weights, 64, 2>(p, stream);
  if (rows <= 80) return LaunchTiles<Bf16Weights, 80, 2>(p, stream);
  return LaunchTiles<Bf16Weights, 128, 4>(p, stream);
}

}  // namespace sluice::kernels::cuda
