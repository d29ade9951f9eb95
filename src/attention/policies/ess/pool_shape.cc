#include "src/attention/policies/ess/pool_shape.h"

#include <algorithm>
#include <cmath>

#include "src/attention/policies/ess/pool_division.h"

namespace sluice {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns how many latent places in each layer every one of `slots` sequences of max_context tokens
// finds in the options' HBM beside its index keys and tables.
int64_t FairPlaces(const PolicyOptions& options, const CacheLayout& model) {
  const int64_t tokens = options.max_context;
  const CacheKind& index = model.kinds[kIndexKind];
  const int64_t word = ResidencyKind().bytes_per_token;
  const int64_t sequence = options.hbm_bytes / std::max(options.slots, 1) / model.layers;
  const int64_t for_places = sequence - index.BlocksFor(tokens) * index.page_bytes() -
                             CeilDiv(tokens + 1, kResidencyWords) * kResidencyWords * word;
  const CacheKind& latent = model.kinds[kLatentKind];
  const int64_t place = latent.bytes_per_token + kPlaceWords * word;
  // A row of the table may leave part of its first and of its last page unused.
  const int64_t places = (for_places - kResidencyWords * word) / place;
  return std::max<int64_t>(places, 0) / latent.block_tokens * latent.block_tokens;
}

// Returns the most places that any sequence has in each layer. A longer sequence may have fewer
// places in a layer than a short one: a short sequence's places are bounded by its length, so what
// some layers cannot use goes to the others.
std::vector<int64_t> MostByLayer(const EssPoolShape& shape) {
  std::vector<int64_t> most(static_cast<size_t>(shape.layers), 0);
  for (int64_t end = shape.block_tokens;; end += shape.block_tokens) {
    // Among totals whose places end in the same block, the largest total has the most places.
    const int64_t total = std::min(end - 1, shape.max_context);
    const std::vector<int64_t> places = shape.PlacesByLayer(total);
    for (size_t layer = 0; layer < most.size(); ++layer) {
      most[layer] = std::max(most[layer], places[layer]);
    }
    if (total == shape.max_context) return most;
  }
}

}  // namespace

CacheKind ResidencyKind() {
  CacheKind kind;
  kind.name = "residency";
  kind.element_type = DType::kFloat32;
  kind.heads = 1;
  kind.block_tokens = static_cast<int>(kResidencyWords);
  kind.SetEqualParts(1, 4);
  return kind;
}

int64_t EssPoolShape::NeededPlaces(int64_t total) const {
  const int64_t new_tokens = rows > 1 ? rows : 0;
  return std::min(rows * top_k + new_tokens, total) + 1;
}

int64_t EssPoolShape::PlacesOf(int64_t total) const {
  const int64_t needed = NeededPlaces(total);
  const auto by_ratio = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(total)));
  const int64_t wanted = std::max({least_places, by_ratio, fair_places});
  const int64_t places = std::max(needed, std::min(wanted, total + 1));
  return CeilDiv(places, block_tokens) * block_tokens;
}

std::vector<int64_t> EssPoolShape::PlacesByLayer(int64_t total) const {
  const int64_t mean = PlacesOf(total);
  std::vector<int64_t> places(static_cast<size_t>(layers), mean);
  if (shares.empty() || mean > total) return places;
  const auto blocks = [&](int64_t count) { return CeilDiv(count, block_tokens); };
  const int64_t least = blocks(NeededPlaces(total)), most = blocks(total + 1);
  const int64_t all = mean / block_tokens * layers;
  // Gives each layer `factor` times its share, within its bounds, and returns the sum in blocks.
  // The bisection below finds the largest factor whose sum is within what there is.
  const auto divide = [&](double factor) {
    int64_t sum = 0;
    for (size_t layer = 0; layer < places.size(); ++layer) {
      const auto wanted = static_cast<int64_t>(std::min(factor * shares[layer], 1e9));
      places[layer] = std::clamp(wanted, least, most) * block_tokens;
      sum += places[layer] / block_tokens;
    }
    return sum;
  };
  double low = 0, high = static_cast<double>(all) / *std::min_element(shares.begin(), shares.end());
  while (high - low > 1e-4 * high) {
    const double middle = (low + high) / 2;
    (divide(middle) <= all ? low : high) = middle;
  }
  divide(low);
  return places;
}

int64_t EssPoolShape::most_places() const {
  return shares.empty() ? PlacesOf(max_context)
                        : *std::max_element(most_by_layer.begin(), most_by_layer.end());
}

bool EssPoolShape::HoldsAllWhole() const {
  return std::max({least_places, fair_places, NeededPlaces(max_context)}) > max_context;
}

int64_t EssPoolShape::PlaceOfPages(int64_t total) const {
  return CeilDiv(total + 1, kResidencyWords);
}

int64_t EssPoolShape::PlacesPages(int64_t places) const {
  return CeilDiv(places * kPlaceWords, kResidencyWords);
}

int64_t EssPoolShape::ResidencyPages(int64_t total, int layer, int64_t places) const {
  const int64_t pages = PlacesPages(places);
  return PlaceOfPages(total) + pages + (pages < PlacesPages(MostPlaces(layer)) ? 1 : 0);
}

TokensByKind EssPoolShape::HbmTokens(int64_t total) const {
  int64_t blocks = 0, pages = 0;
  const std::vector<int64_t> places = PlacesByLayer(total);
  for (int layer = 0; layer < layers; ++layer) {
    const int64_t own = places[static_cast<size_t>(layer)];
    blocks += own / block_tokens;
    pages += ResidencyPages(total, layer, own);
  }
  return {CeilDiv(blocks, layers) * block_tokens, total, CeilDiv(pages, layers) * kResidencyWords};
}

EssPoolShape EssShapeOf(const PolicyOptions& options, int layers, int64_t block_tokens,
                        int64_t capacity_places) {
  EssPoolShape shape;
  shape.layers = layers;
  shape.top_k = options.index_top_k + options.ess.prefetch;
  shape.rows = options.rows_per_sequence;
  shape.max_context = options.max_context;
  shape.block_tokens = block_tokens;
  shape.least_places = options.ess.least_places;
  shape.ratio = options.ess.sparse_memory_ratio;
  if (shape.ratio == 0) {
    shape.fair_places = capacity_places / std::max(options.slots, 1) / block_tokens * block_tokens;
  } else if (options.ess.divide_places) {
    shape.shares = DividePlaces(options, shape);
    if (!shape.shares.empty()) shape.most_by_layer = MostByLayer(shape);
  }
  return shape;
}

TierShapes EssTierShapesOf(const PolicyOptions& options, const CacheLayout& model) {
  TierShapes tiers;
  tiers.dram.layout = model;
  tiers.hbm.layout = model;
  // A model without an indexer has nothing to be sparse about: the policy is refused, not the
  // tiers.
  if (model.kinds.size() != 2) return tiers;
  // Index keys are in DRAM while a sequence comes in or is kept, and not while it runs.
  tiers.dram.shared = true;
  tiers.hbm.layout.kinds.push_back(ResidencyKind());
  EssPoolShape shape = EssShapeOf(options, model.layers, model.kinds[kLatentKind].block_tokens, 0);
  if (shape.ratio == 0) shape.fair_places = FairPlaces(options, model);
  tiers.hbm.proportion = shape.HbmTokens(options.max_context);
  return tiers;
}

}  // namespace sluice
