// The caches of models with latent attention (kernels/latent_params.h): "latent" has an entry for
// each token, and "index" has the indexer's keys, if there is an indexer.
#pragma once

#include "absl/status/statusor.h"
#include "src/kv/cache_layout.h"
#include "src/model/model_config.h"

namespace sluice {

// Returns the layout, with the kinds in this order. Returns INVALID_ARGUMENT, which names kv_dtype,
// for the packed form (fp8) of entries that are not 512 + 64 elements. REQUIRES: config.latent.
absl::StatusOr<CacheLayout> LatentCacheLayout(const ModelConfig& config, DType kv_dtype,
                                              int block_tokens);

}  // namespace sluice
