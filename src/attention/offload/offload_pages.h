// How the HBM pages of a sequence in the offload tiers are divided: the blocks of dense layers,
// then, for each sparse layer, places and the rows of arrays. Pages are equal, so this is
// arithmetic alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/offload/offload_tier.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Arrays that grow together share their pages: a page has room, in each head's part, for the rows
// of `tokens_per_page` tokens of every one of them.
struct ArrayPages {
  struct Rows {
    std::string name;
    int64_t tokens_per_row = 0;
    int32_t dim = 0;
    kernels::DType type = kernels::DType::kFloat32;
    int64_t offset = 0;  // bytes, in a head's part of the page
    int32_t rows_per_page = 0;
    int64_t row_bytes() const { return dim * kernels::SizeOf(type); }
  };
  std::vector<Rows> rows;
  int64_t tokens_per_page = 0;

  int64_t PagesFor(int64_t tokens) const {
    return (tokens + tokens_per_page - 1) / tokens_per_page;
  }
  // Sets offsets, rows_per_page and tokens_per_page. INVALID_ARGUMENT names a row that no page
  // holds.
  absl::Status Fit(int64_t head_bytes);
};

struct OffloadPages {
  // INVALID_ARGUMENT names what is out of range.
  static absl::StatusOr<OffloadPages> Of(const OffloadTierOptions& options);

  int layers = 0, dense_layers = 0;
  CacheKind kind;
  int64_t ring_blocks = 0;
  int64_t place_blocks = 0;  // of the longest sequence, the ring's included
  int64_t most_blocks = 0;   // of the longest sequence
  int64_t units_per_block = 1;
  ArrayPages by_token;  // of the sequence: OffloadTierOptions::arrays with tokens_per_row > 0, in
                        // their order, then ResidencyTable::place_of
  ArrayPages by_place;  // the other arrays, by token of a place, then ResidencyTable::places

  int sparse_layers() const { return layers - dense_layers; }
  int64_t unit_tokens() const { return kind.block_tokens / units_per_block; }
  int64_t ring_units() const { return ring_blocks * units_per_block; }
  int64_t place_units() const { return place_blocks * units_per_block; }
  int64_t PlaceBlocksOf(int64_t total) const;
  // The tables of places have a row for every place that any sequence could have.
  int64_t place_pages() const { return by_place.PagesFor(place_blocks * kind.block_tokens); }

  // Of a sequence of `total` tokens: pages in all, and tokens of a reservation that has as many.
  int64_t PagesOf(int64_t total) const;
  int64_t PoolTokensOf(int64_t total) const;

  // A slot's page numbers, in one row of int32: the dense layers' blocks, then for each sparse
  // layer its places, by_token's pages and by_place's.
  int64_t token_pages() const { return by_token.PagesFor(most_blocks * kind.block_tokens); }
  int64_t sparse_entries() const { return place_blocks + token_pages() + place_pages(); }
  int64_t entries() const {
    return dense_layers * most_blocks + sparse_layers() * sparse_entries();
  }
  int64_t DenseEntry(int layer) const { return layer * most_blocks; }
  int64_t PlacesEntry(int layer) const {
    return dense_layers * most_blocks + (layer - dense_layers) * sparse_entries();
  }
  int64_t ByTokenEntry(int layer) const { return PlacesEntry(layer) + place_blocks; }
  int64_t ByPlaceEntry(int layer) const { return ByTokenEntry(layer) + token_pages(); }
};

}  // namespace sluice
