#include "src/engine/rank_heads.h"

#include "src/base/status_macros.h"
#include "src/model/shard.h"

namespace sluice {

absl::StatusOr<HintPart> HintPartOf(const ModelConfig& whole, int rank, int ranks) {
  HintPart part;
  if (whole.latent.has_value()) return part;
  SLUICE_ASSIGN_OR_RETURN(const Shard shard, ShardOf(whole, rank, ranks));
  part.first = static_cast<uint32_t>(shard.kv_heads.first);
  part.count = static_cast<uint32_t>(shard.kv_heads.count);
  part.first_query = static_cast<uint32_t>(shard.heads.first);
  part.query_count = static_cast<uint32_t>(shard.heads.count);
  part.query_heads = static_cast<uint32_t>(whole.heads);
  part.head_dim = static_cast<uint32_t>(whole.head_dim);
  return part;
}

absl::StatusOr<HeadPlaces> HeadPlacesOf(const ModelConfig& whole, const CacheLayout& own,
                                        const SharedArenas* arenas, FarHeads* far, int ranks) {
  SLUICE_CHECK(arenas != nullptr || far != nullptr, "somebody writes to the other ranks");
  HeadPlaces out;
  if (arenas == nullptr) out.far = far;
  out.layout = own;
  for (CacheKind& kind : out.layout.kinds) {
    const int own_heads = kind.heads;
    if (!whole.latent.has_value()) kind.heads = whole.kv_heads;
    std::vector<HeadPlaces::Place>& places =
        out.places.emplace_back(static_cast<size_t>(kind.heads));
    for (int rank = 0; rank < ranks; ++rank) {
      SLUICE_ASSIGN_OR_RETURN(const HintPart part, HintPartOf(whole, rank, ranks));
      for (int head = 0; head < own_heads; ++head) {
        HeadPlaces::Place& place = places[part.first + static_cast<size_t>(head)];
        place.head = head;
        if (arenas != nullptr) {
          place.distances.push_back(arenas->Of(rank) - arenas->Of(0));
        } else if (rank == 0) {
          place.distances.push_back(0);
        } else {
          place.far_ranks.push_back(rank);
        }
      }
    }
  }
  return out;
}

HeadPlaces PlacesOnRank(const CacheLayout& layout, FarHeads* far, int rank) {
  HeadPlaces out;
  out.layout = layout;
  if (rank > 0) out.far = far;
  for (const CacheKind& kind : layout.kinds) {
    std::vector<HeadPlaces::Place>& places = out.places.emplace_back();
    for (int head = 0; head < kind.heads; ++head) {
      HeadPlaces::Place& place = places.emplace_back();
      place.head = head;
      if (rank == 0) {
        place.distances.push_back(0);
      } else {
        place.far_ranks.push_back(rank);
      }
    }
  }
  return out;
}

}  // namespace sluice
