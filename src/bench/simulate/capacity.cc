#include "src/bench/simulate/capacity.h"

#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"
#include "src/base/status_macros.h"
#include "src/model/latent_caches.h"

namespace sluice::bench {

absl::StatusOr<Capacity> CapacityOf(const ModelConfig& config, const CapacityAsk& ask) {
  SLUICE_ASSIGN_OR_RETURN(const CacheLayout model,
                          LatentCacheLayout(config, DType::kFloat8E4M3, ask.block_tokens));
  CacheLayout drafts = model;
  drafts.layers = ask.draft_layers;
  Capacity capacity;
  capacity.hbm_bytes_each = drafts.BytesFor(ask.context);
  if (ask.ess) {
    PolicyOptions options;
    options.index_top_k = config.latent->indexer->top_k;
    options.max_context = static_cast<int>(ask.context);
    options.hbm_bytes = ask.hbm_bytes;
    options.ess.sparse_memory_ratio = ask.ratio;
    options.ess.least_places = static_cast<int>(ask.least_places);
    const EssPoolShape shape = EssShapeOf(options, model.layers, ask.block_tokens, 0);
    const CacheLayout hbm = EssTierShapesOf(options, model).hbm.layout;
    capacity.hbm_bytes_each += hbm.BytesFor(shape.HbmTokens(ask.context));
    capacity.dram_bytes_each = model.BytesFor({ask.context, 0});
    capacity.places = shape.PlacesOf(ask.context);
    capacity.whole = ask.ratio >= 1 || shape.HoldsWhole(ask.context);
  } else {
    capacity.hbm_bytes_each += model.BytesFor(ask.context);
  }
  capacity.sequences = ask.hbm_bytes / capacity.hbm_bytes_each;
  capacity.bound = "HBM";
  // Policy full has DRAM only for caches on their way in.
  if (ask.ess && ask.dram_bytes / capacity.dram_bytes_each < capacity.sequences) {
    capacity.sequences = ask.dram_bytes / capacity.dram_bytes_each;
    capacity.bound = "DRAM";
  }
  return capacity;
}

}  // namespace sluice::bench
