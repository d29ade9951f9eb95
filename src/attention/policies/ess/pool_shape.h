// How much of HBM and DRAM a sequence takes under policy ess: arithmetic alone.
//
// In HBM a sequence has its index keys, all of them, for each layer a Sparse Memory Pool of
// *places* for latent entries, and the tables that say what lies where: place_of, 4 bytes a token,
// and places, 8 bytes a place (kernels::ResidencyTable). In DRAM it has its home, every entry.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/latent/latent_views.h"
#include "src/attention/policy_options.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Behind the model's kinds, in HBM's layout alone.
inline constexpr size_t kResidencyKind = 2;

struct EssPoolShape {
  int64_t top_k = 0;  // entries that a row attends to, and those that are brought for the next
  int64_t max_context = 0;
  int64_t block_tokens = 0;  // of latent pages
  int64_t least_places = 0;  // whatever the ratio
  double ratio = 0;          // of places to tokens
  int64_t fair_places = 0;   // `auto`: what each of `slots` sequences has at least; else 0
  int layers = 1;
  // How the places of all layers are divided among them (pool_division.h): by layer, in proportion;
  // empty: all have the same. With each the most places of any sequence.
  std::vector<double> shares;
  std::vector<int64_t> most_by_layer;

  // Places of a layer of a sequence of `total` tokens at its end, the mean of them, whole blocks.
  // At least what a step needs (every entry that it selects, and one for the next token),
  // least_places, and the ratio or the fair share; never more than the sequence has tokens, and the
  // next one.
  int64_t PlacesOf(int64_t total) const;
  // Of each layer: so many on average at most, as many as a step needs at least, and no more than
  // tokens.
  std::vector<int64_t> PlacesByLayer(int64_t total) const;
  int64_t MostPlaces(int layer) const {
    return shares.empty() ? PlacesOf(max_context) : most_by_layer[static_cast<size_t>(layer)];
  }
  int64_t most_places() const;  // of any layer
  // Whether each token of such a sequence, and the next one, has a place: nothing is ever given up,
  // so what its rows have selected does not matter.
  bool HoldsWhole(int64_t total) const { return PlacesOf(total) > total; }
  // Whether that is so for every sequence, whatever its length. (Not because it is so for the
  // longest: of a ratio near 1 the rounding to blocks decides, for each length anew.)
  bool HoldsAllWhole() const;

  // Of the tables, in 4-byte words, each beginning with a page of its own.
  int64_t PlaceOfPages(int64_t total) const;
  int64_t PlacesPages(int64_t places) const;
  // Both, and where the longest sequence has more pages of places in the layer one that says that
  // there are none.
  int64_t ResidencyPages(int64_t total, int layer, int64_t places) const;
  // On average of the layers, rounded up.
  TokensByKind HbmTokens(int64_t total) const;
};

// The residency tables' kind: a page of 1,024 words.
CacheKind ResidencyKind();
inline constexpr int64_t kResidencyWords = 1024;

// Words of a row of ResidencyTable::places.
inline constexpr int32_t kPlaceWords = 2;

// What a sequence takes under these options. `capacity_places`: latents of one sequence that HBM
// holds, for `auto`; 0 where it is not known yet.
EssPoolShape EssShapeOf(const PolicyOptions& options, int layers, int64_t block_tokens,
                        int64_t capacity_places);

// The layouts of both tiers: HBM is divided as sequences of max_context tokens take it, DRAM is
// shared by what there is.
TierShapes EssTierShapesOf(const PolicyOptions& options, const CacheLayout& model);

}  // namespace sluice
