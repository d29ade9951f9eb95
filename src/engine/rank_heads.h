// Which heads of a divided model's caches each rank has (src/model/shard.h), for what comes to
// rank 0 and is for all: caches that are handed over, and their hints.
#pragma once

#include "absl/status/statusor.h"
#include "src/device/shared_arenas.h"
#include "src/kv/cache_layout.h"
#include "src/kv/far_heads.h"
#include "src/kv/head_places.h"
#include "src/kv/selection_hints.h"
#include "src/model/model_config.h"

namespace sluice {

// Returns the heads of a rank; none where all ranks have all caches (latents). The errors are
// ShardOf's.
absl::StatusOr<HintPart> HintPartOf(const ModelConfig& whole, int rank, int ranks);

// Returns where the heads are, whose ranks' pools begin where `arenas` do; where there are none,
// rank 0 sees its own pool alone, and `far` writes to the others'. `own` is the layout of a rank's
// pool.
absl::StatusOr<HeadPlaces> HeadPlacesOf(const ModelConfig& whole, const CacheLayout& own,
                                        const SharedArenas* arenas, FarHeads* far, int ranks);

// Returns where all heads of a sequence are that rank `rank` alone has, of pools of this layout.
// Rank 0 writes to its own pages, and by `far` to those of the others.
HeadPlaces PlacesOnRank(const CacheLayout& layout, FarHeads* far, int rank);

}  // namespace sluice
