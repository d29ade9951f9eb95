// The division of attention over workers: plain arithmetic on the rows, the same for every worker
// and for both phases.
//
// Neighbouring rows of one sequence form a tile, whose queries read each K and V once. A tile's
// context is cut into splits of kAttentionSplitTokens. Where `partial` has room for (rows x splits)
// entries of a tile, every (tile, head part, split) is an item of work of its own and
// attention_merge() puts the splits together; elsewhere (tile, head part) is an item and merges on
// the way, with the same arithmetic.
#pragma once

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kMaxQueries = 48;    // query vectors of a tile: rows x heads of a group
inline constexpr int kMaxGroupPart = 16;  // heads of a group that share a tile

// The division of a KV head's query heads into `parts` parts of at most `heads` each.
struct GroupShape {
  int64_t group;
  int64_t parts;
  int64_t heads;      // heads of a part; the last may have fewer
  int64_t tile_rows;  // most rows of a tile
};

inline GroupShape GroupShapeOf(const AttentionParams& p) {
  GroupShape g;
  g.group = p.heads / p.cache.kv_heads;
  g.parts = CeilDiv(g.group, kMaxGroupPart);
  g.heads = CeilDiv(g.group, g.parts);
  g.tile_rows = kMaxQueries / g.heads;
  return g;
}

struct AttentionTile {
  int64_t row = 0;
  int64_t rows = 0;
  int64_t tokens = 0;  // context of the tile's longest row
  int64_t splits = 0;
  int64_t partial = -1;  // first entry in `partial`, row-major [rows][splits]; -1: not used
};

// Walks the tiles of a launch in order of their rows. Padded rows are in no tile.
class TileWalk {
 public:
  TileWalk(const AttentionParams& p, int64_t tile_rows) : p_(p), tile_rows_(tile_rows) {}

  bool Next(AttentionTile* tile) {
    while (row_ < p_.rows && p_.slots[row_] < 0) ++row_;
    if (row_ >= p_.rows) return false;
    tile->row = row_;
    tile->tokens = 0;
    for (; row_ < p_.rows && row_ - tile->row < tile_rows_ && p_.slots[row_] == p_.slots[tile->row];
         ++row_) {
      tile->tokens = Max(tile->tokens, int64_t{p_.positions[row_]} + 1);
    }
    tile->rows = row_ - tile->row;
    tile->splits = CeilDiv(tile->tokens, kAttentionSplitTokens);
    tile->partial = -1;
    const int64_t entries = tile->rows * tile->splits;
    if (tile->splits > 1 && p_.partial != nullptr && used_ + entries <= p_.partial_rows) {
      tile->partial = used_;
      used_ += entries;
    }
    return true;
  }

 private:
  const AttentionParams& p_;
  const int64_t tile_rows_;
  int64_t row_ = 0;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace sluice::kernels::cpu
