// Products with weights in e4m3 with block scales: nk bytes of W, and its scales, 2k + 4n of each
// row. Floor: those bytes over the memory's rate.
#include "kernels/cuda/grouped_product.cuh"

namespace sluice::kernels::cuda {

cudaError_t LaunchTiledProductFp8(const GroupedProduct& p, cudaStream_t stream) {
  const int rows = TypicalRows(p);
  if (rows <= 8) return LaunchTiles<Fp8Weights, 8, 2>(p, stream);
  if (rows <= 32) return LaunchTiles<Fp8Weights, 32, 2>(p, stream);
  if (rows <= 64) return LaunchTiles<Fp8Weights, 64, 2>(p, stream);
  if (rows <= 80) return LaunchTiles<Fp8Weights, 80, 2>(p, stream);
  return LaunchTiles<Fp8Weights, 128, 4>(p, stream);
}

}  // namespace sluice::kernels::cuda
