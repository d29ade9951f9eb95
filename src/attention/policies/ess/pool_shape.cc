#include "src/attention/policies/ess/pool_shape.h"

#include <algorithm>
#include <cmath>

namespace sluice {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Latent places for each layer that `slots` sequences of max_context tokens find in `bytes` of HBM
// beside their index keys and tables, each.
int64_t FairPlaces(const PolicyOptions& options, const CacheLayout& model) {
  const int64_t tokens = options.max_context;
  const CacheKind& index = model.kinds[kIndexKind];
  const int64_t word = ResidencyKind().bytes_per_token;
  const int64_t sequence = options.hbm_bytes / std::max(options.slots, 1) / model.layers;
  const int64_t for_places = sequence - index.BlocksFor(tokens) * index.page_bytes() -
                             CeilDiv(tokens + 1, kResidencyWords) * kResidencyWords * word;
  const CacheKind& latent = model.kinds[kLatentKind];
  const int64_t place = latent.bytes_per_token + kPlaceWords * word;
  // Their rows of the table begin and end with pages.
  const int64_t places = (for_places - kResidencyWords * word) / place;
  return std::max<int64_t>(places, 0) / latent.block_tokens * latent.block_tokens;
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

int64_t EssPoolShape::PlacesOf(int64_t total) const {
  const int64_t needed = std::min(top_k, total) + 1;
  const auto by_ratio = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(total)));
  const int64_t wanted = std::max({least_places, by_ratio, fair_places});
  const int64_t places = std::max(needed, std::min(wanted, total + 1));
  return CeilDiv(places, block_tokens) * block_tokens;
}

bool EssPoolShape::HoldsAllWhole() const {
  return std::max({least_places, fair_places, top_k + 1}) > max_context;
}

int64_t EssPoolShape::PlaceOfPages(int64_t total) const {
  return CeilDiv(total + 1, kResidencyWords);
}

int64_t EssPoolShape::PlacesPages(int64_t places) const {
  return CeilDiv(places * kPlaceWords, kResidencyWords);
}

int64_t EssPoolShape::ResidencyPages(int64_t total) const {
  const int64_t places = PlacesPages(PlacesOf(total));
  return PlaceOfPages(total) + places + (places < PlacesPages(most_places()) ? 1 : 0);
}

TokensByKind EssPoolShape::HbmTokens(int64_t total) const {
  return {PlacesOf(total), total, ResidencyPages(total) * kResidencyWords};
}

EssPoolShape EssShapeOf(const PolicyOptions& options, int64_t block_tokens,
                        int64_t capacity_places) {
  EssPoolShape shape;
  shape.top_k = options.index_top_k;
  shape.max_context = options.max_context;
  shape.block_tokens = block_tokens;
  shape.least_places = options.ess.least_places;
  shape.ratio = options.ess.sparse_memory_ratio;
  if (shape.ratio == 0) {
    shape.fair_places = capacity_places / std::max(options.slots, 1) / block_tokens * block_tokens;
  }
  return shape;
}

TierShapes EssTierShapesOf(const PolicyOptions& options, const CacheLayout& model) {
  TierShapes tiers;
  tiers.dram.layout = model;
  tiers.hbm.layout = model;
  // Without an indexer there is nothing to be sparse about: the policy is refused, not the tiers.
  if (model.kinds.size() != 2) return tiers;
  // Index keys are in DRAM while a sequence comes in or is kept, not while it runs.
  tiers.dram.shared = true;
  tiers.hbm.layout.kinds.push_back(ResidencyKind());
  EssPoolShape shape = EssShapeOf(options, model.kinds[kLatentKind].block_tokens, 0);
  if (shape.ratio == 0) shape.fair_places = FairPlaces(options, model);
  tiers.hbm.proportion = shape.HbmTokens(options.max_context);
  return tiers;
}

}  // namespace sluice
