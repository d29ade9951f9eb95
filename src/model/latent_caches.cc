#include "src/model/latent_caches.h"

#include "kernels/latent_params.h"
#include "src/base/status_macros.h"

namespace sluice {

absl::StatusOr<CacheLayout> LatentCacheLayout(const ModelConfig& config, DType kv_dtype,
                                              int block_tokens) {
  const LatentConfig& latent = *config.latent;
  if (kv_dtype == DType::kFloat8E4M3 &&
      (latent.rank != kernels::kPackedRank || latent.rope_dim != kernels::kPackedRope)) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_dtype: fp8 packs entries of ", kernels::kPackedRank, " latent and ",
                     kernels::kPackedRope, " RoPE values, those of ", config.name, " have ",
                     latent.rank, " and ", latent.rope_dim, ": use bf16"));
  }
  const auto kind = [&](const char* name) {
    CacheKind out;
    out.name = name;
    out.element_type = kv_dtype;
    out.heads = 1;
    out.block_tokens = block_tokens;
    return out;
  };
  CacheLayout layout;
  layout.layers = config.layers;
  CacheKind& entries = layout.kinds.emplace_back(kind("latent"));
  entries.SetEqualParts(1, kernels::EntryBytes(kv_dtype, latent.rank, latent.rope_dim));
  if (!latent.indexer.has_value()) return layout;

  CacheKind& keys = layout.kinds.emplace_back(kind("index"));
  keys.SetEqualParts(1, kernels::IndexKeyBytes(kv_dtype));
  if (kv_dtype == DType::kFloat8E4M3) {
    keys.part_bytes = {kernels::kIndexDim, sizeof(float)};  // values, then their scales
  }
  return layout;
}

}  // namespace sluice
