// HeadPlaces says where the heads of a divided model's caches are. Every rank has pools of the same
// shape, and a sequence has the same page numbers on all of them, so a block's place on another
// rank is a distance from its place on rank 0; the memory of ranks on other hosts is written by
// far_heads.h. A head that several ranks have is on each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/kv/cache_layout.h"

namespace sluice {

class FarHeads;

// Heads [begin, end) of every cache kind that a rank on another host alone has.
struct RankHeads {
  int rank = 0;
  uint32_t begin = 0, end = 0;
};

struct HeadPlaces {
  struct Place {
    int head = 0;  // its number among the heads of the ranks that have it
    // The bytes from a block of rank 0's head of that number to the block of each rank that has
    // this head.
    std::vector<std::ptrdiff_t> distances;
    // Ranks that have this head, and whose memory this process does not see.
    std::vector<int> far_ranks = {};
    // Returns whether that rank, on another host, alone has the head.
    bool IsOf(int rank) const {
      return distances.empty() && far_ranks.size() == 1 && far_ranks[0] == rank;
    }
  };
  // Returns the heads that one rank on another host has, in ascending order. Kinds that ranks
  // divide have as many heads as one another.
  std::vector<RankHeads> OfOneRank() const;
  // The whole model's caches, in the ranks' order of kinds.
  CacheLayout layout;
  std::vector<std::vector<Place>> places;  // [kind][head of the whole model]
  FarHeads* far = nullptr;                 // with far_ranks; outlives all transfers
};

}  // namespace sluice
