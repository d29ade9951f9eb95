// The two forms of IndexLogits.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// Limits for packed keys on tensor cores: at most kIndexTileHeads heads, and blocks of
// kIndexTileTokens tokens or parts or multiples of them.
inline constexpr int kIndexTileTokens = 64;
inline constexpr int kIndexTileHeads = 64;
bool FitsIndexTiles(const IndexLogitsParams& params);
cudaError_t LaunchIndexTiles(const IndexLogitsParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
