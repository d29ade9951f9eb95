#include "src/kv/head_places.h"

namespace sluice {

std::vector<RankHeads> HeadPlaces::OfOneRank() const {
  std::vector<RankHeads> out;
  const std::vector<Place>& heads = places.front();
  for (uint32_t head = 0; head < heads.size(); ++head) {
    const Place& place = heads[head];
    if (place.far_ranks.empty() || !place.IsOf(place.far_ranks[0])) continue;
    const int rank = place.far_ranks[0];
    if (!out.empty() && out.back().rank == rank && out.back().end == head) {
      out.back().end = head + 1;
    } else {
      out.push_back({rank, head, head + 1});
    }
  }
  return out;
}

}  // namespace sluice
