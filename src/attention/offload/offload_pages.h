// How the HBM pages of a sequence in the offload tiers are divided: first the blocks of dense
// layers, then, for each sparse layer, places and the rows of arrays. All pages have the same size,
// so this is only arithmetic. Arrays in DRAM are pages of the home, which has the same pages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/offload/offload_tier.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Arrays that grow together share their pages: in each head's part, a page holds the rows of
// `tokens_per_page` tokens of every one of these arrays.
struct ArrayPages {
  struct Rows {
    std::string name;
    int64_t tokens_per_row = 0;
    int32_t dim = 0;
    kernels::DType type = kernels::DType::kFloat32;
    int64_t offset = 0;  // bytes from the begin of a head's part of the page
    int32_t rows_per_page = 0;
    int64_t row_bytes() const { return dim * kernels::SizeOf(type); }
    // Returns the address of a row of KV head `head`, if the array's pages are `pages`.
    uint8_t* At(const PagePool& pool, const int32_t* pages, int head, int64_t row) const {
      return pool.PageAddress(0, pages[row / rows_per_page]) +
             head * pool.layout().kinds[0].block_bytes() + offset +
             row % rows_per_page * row_bytes();
    }
  };
  std::vector<Rows> rows;
  int64_t tokens_per_page = 0;

  int64_t PagesFor(int64_t tokens) const {
    return rows.empty() ? 0 : (tokens + tokens_per_page - 1) / tokens_per_page;
  }
  // Sets offsets, rows_per_page and tokens_per_page. INVALID_ARGUMENT: a row does not fit into a
  // page; the message names it.
  absl::Status Fit(int64_t head_bytes);
};

struct OffloadPages {
  // INVALID_ARGUMENT: the message names the option that is out of range.
  static absl::StatusOr<OffloadPages> Of(const OffloadTierOptions& options);

  int layers = 0, dense_layers = 0;
  CacheKind kind;
  int64_t ring_blocks = 0, recall_blocks = 0;  // as in the options
  double recall_share = 0;
  // Places of the longest sequence in a head that is not persistent, the ring's included.
  int64_t place_blocks = 0;
  int64_t most_blocks = 0;  // blocks of the longest sequence
  int64_t units_per_block = 1;
  ArrayPages by_token;  // OffloadTierOptions::arrays in HBM with tokens_per_row > 0, in
                        // their order, then ResidencyTable::place_of
  ArrayPages by_place;  // those with tokens_per_row == 0, by token of a place, then
                        // ResidencyTable::places
  ArrayPages at_home;   // those in DRAM, by token; may be none
  std::vector<ArrayPages OffloadPages::*> groups;  // by index of OffloadTierOptions::arrays
  std::vector<uint8_t> persistent;                 // as in the options

  const ArrayPages::Rows& residency() const { return by_token.rows.back(); }
  const ArrayPages::Rows& places() const { return by_place.rows.back(); }
  // Position of an array, by its index in OffloadTierOptions::arrays.
  struct ArrayAt {
    const ArrayPages* group;
    const ArrayPages::Rows* rows;
  };
  ArrayAt Array(size_t index) const;
  // Returns where the pages of a group begin in a slot's row of page numbers.
  int64_t EntryOf(const ArrayPages& group, int layer) const {
    return &group == &by_token   ? ByTokenEntry(layer)
           : &group == &by_place ? ByPlaceEntry(layer)
                                 : AtHomeEntry(layer);
  }

  int sparse_layers() const { return layers - dense_layers; }
  int64_t unit_tokens() const { return kind.block_tokens / units_per_block; }
  int64_t ring_units() const { return ring_blocks * units_per_block; }
  int64_t place_units() const { return place_blocks * units_per_block; }
  // Returns the blocks of places that a sequence of `total` tokens has in a head, which is not
  // persistent where none is named; and the pages that those of a layer's heads take.
  int64_t PlaceBlocksOf(int64_t total) const;
  int64_t PlaceBlocksOf(int64_t total, int layer, int head) const;
  int64_t PlacePagesOf(int64_t total, int layer) const;
  // The tables of places have a row for every place that any sequence could have.
  int64_t place_pages() const { return by_place.PagesFor(place_blocks * kind.block_tokens); }

  // Returns, for a sequence of `total` tokens, its pages, and the tokens of a reservation that has
  // as many pages.
  int64_t PagesOf(int64_t total) const;
  int64_t PoolTokensOf(int64_t total) const;
  // Returns the tokens of the home of such a sequence: its own, and as many as have the pages of
  // arrays in DRAM.
  int64_t HomeTokensOf(int64_t total) const;

  // A slot's page numbers, in one row of int32: the dense layers' blocks, then for each sparse
  // layer its places, by_token's pages, by_place's and at_home's, which are the home's. In a layer
  // with a persistent head the places are numbers of blocks of one head
  // (kernels::PagedCache::head_tables), in a table for each head.
  std::vector<int64_t> places_entries;  // PlacesEntry of every sparse layer, then entries()
  int64_t token_pages() const { return by_token.PagesFor(most_blocks * kind.block_tokens); }
  int64_t home_pages() const { return at_home.PagesFor(most_blocks * kind.block_tokens); }
  int64_t entries() const { return places_entries.back(); }
  int64_t DenseEntry(int layer) const { return layer * most_blocks; }
  int64_t PlacesEntry(int layer) const {
    return places_entries[static_cast<size_t>(layer - dense_layers)];
  }
  int64_t ByTokenEntry(int layer) const { return ByPlaceEntry(layer) - token_pages(); }
  int64_t ByPlaceEntry(int layer) const { return AtHomeEntry(layer) - place_pages(); }
  int64_t AtHomeEntry(int layer) const { return PlacesEntry(layer + 1) - home_pages(); }
  bool HasHeadTables(int layer) const;
  // Returns where the table of a head begins behind PlacesEntry, if the layer has such tables.
  int64_t HeadTable(int layer, int head) const;
  bool IsPersistent(int layer, int head) const;

 private:
  void LayOut();
};

}  // namespace sluice
