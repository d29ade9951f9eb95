// The caches of models with latent attention (kernels/latent_params.h): "latent", an entry for each
// token, and, where there is an indexer, "index", its keys.
#pragma once

#include "absl/status/statusor.h"
#include "src/kv/cache_layout.h"
#include "src/model/model_config.h"

namespace sluice {

// The kinds in this order. INVALID_ARGUMENT naming kv_dtype: the packed form (fp8) is one of
// entries of 512 + 64 elements. REQUIRES: config.latent.
absl::StatusOr<CacheLayout> LatentCacheLayout(const ModelConfig& config, DType kv_dtype,
                                              int block_tokens);

}  // namespace sluice
