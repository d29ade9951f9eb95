// How much HBM and DRAM a sequence takes under policy ess. This file is arithmetic alone.
//
// In HBM a sequence has all of its index keys and, for each layer, a Sparse Memory Pool of *places*
// for latent entries with the tables that say which entry has which place: place_of, 4 bytes a
// token, and places, 8 bytes a place (kernels::ResidencyTable). In DRAM it has its *home*: every
// entry.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/latent/latent_views.h"
#include "src/attention/policy_options.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// The cache kind of the residency tables. It follows the model's kinds, in HBM's layout only.
inline constexpr size_t kResidencyKind = 2;

struct EssPoolShape {
  int64_t top_k = 0;  // Entries that a row attends to, plus those fetched for the next step.
  int64_t rows = 1;   // Most decode rows of a sequence in a step.
  int64_t max_context = 0;
  int64_t block_tokens = 0;  // Tokens of a page of latent entries.
  int64_t least_places = 0;  // Lower bound on places, whatever the ratio is.
  double ratio = 0;          // Places per token; 0: `auto`.
  // The least number of places of each of `slots` sequences under `auto`; 0 otherwise.
  int64_t fair_places = 0;
  int layers = 1;
  // How the places of all layers are divided among them (pool_division.h): one share for each
  // layer, to which its places are in proportion. Empty: every layer has the same number.
  // `most_by_layer` has, for each share, the most places that any sequence has in that layer.
  std::vector<double> shares;
  std::vector<int64_t> most_by_layer;

  // Returns how many places of each layer a step of a sequence that ends with `total` tokens needs:
  // for every entry that its rows may select, for the next token, and, with several rows, for the
  // new token of each (UpdateResidencyParams::in_turn).
  int64_t NeededPlaces(int64_t total) const;
  // Returns the mean places of a layer for a sequence that ends with `total` tokens, in whole
  // blocks. It is at least what a step needs, at least least_places, and at least the ratio or the
  // fair share; it never exceeds the sequence's tokens plus the next one.
  int64_t PlacesOf(int64_t total) const;
  // Returns the places of each layer. Their mean is at most PlacesOf(total); each layer has at
  // least what a step needs, and at most one place for each token and the next one.
  std::vector<int64_t> PlacesByLayer(int64_t total) const;
  int64_t MostPlaces(int layer) const {
    return shares.empty() ? PlacesOf(max_context) : most_by_layer[static_cast<size_t>(layer)];
  }
  int64_t most_places() const;  // The most places that any layer has.
  // Returns whether every token of such a sequence, and the next one, has a place. Then no place is
  // ever taken from an entry, so it does not matter what the sequence's rows have selected.
  bool HoldsWhole(int64_t total) const { return PlacesOf(total) > total; }
  // Returns whether HoldsWhole is true for every length of sequence. It does not follow from the
  // longest one: with a ratio near 1 the rounding to blocks decides for each length anew.
  bool HoldsAllWhole() const;

  // Pages that a table takes. Each table consists of 4-byte words and begins a page of its own.
  int64_t PlaceOfPages(int64_t total) const;
  int64_t PlacesPages(int64_t places) const;
  // Returns the pages of both tables. Where the longest sequence has more pages of places in the
  // layer, this includes one more page, which says that there are no such places.
  int64_t ResidencyPages(int64_t total, int layer, int64_t places) const;
  // Returns what a sequence takes in HBM, as the mean of the layers, rounded up.
  TokensByKind HbmTokens(int64_t total) const;
};

// Returns the cache kind of the residency tables, whose page has kResidencyWords words of 4 bytes.
CacheKind ResidencyKind();
inline constexpr int64_t kResidencyWords = 1024;

// Words of a row of ResidencyTable::places.
inline constexpr int32_t kPlaceWords = 2;

// Returns what a sequence takes under these options. `capacity_places` is the number of latent
// entries of one sequence that HBM holds, which `auto` divides; 0 if that is not known yet.
EssPoolShape EssShapeOf(const PolicyOptions& options, int layers, int64_t block_tokens,
                        int64_t capacity_places);

// Returns the layouts of both tiers. HBM is divided among cache kinds as sequences of max_context
// tokens take it; in DRAM all kinds share what there is.
TierShapes EssTierShapesOf(const PolicyOptions& options, const CacheLayout& model);

}  // namespace sluice
