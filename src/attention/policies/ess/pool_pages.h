// Which of a sequence's pages in HBM belong to which layer's pool and tables. A page pool gives
// every layer the same number of pages. Where layers have different numbers of places
// (EssPoolShape::shares), all of a sequence's pages of a kind form one row, and each layer has the
// next part of it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class PoolPages {
 public:
  PoolPages() = default;
  // Divides the pages of a sequence that ends with `total` tokens. REQUIRES: `hbm` holds
  // shape.HbmTokens(total).
  PoolPages(const EssPoolShape& shape, const SequenceCache& hbm, int64_t total);

  int64_t total() const { return total_; }
  int64_t places(int layer) const { return places_[static_cast<size_t>(layer)]; }
  int64_t most_places() const;  // The most that any layer has.
  // Page numbers of the latent entries in order of place, and of the residency tables.
  absl::Span<const int32_t> Latents(int layer) const { return Part(latents_, layer); }
  absl::Span<const int32_t> Residency(int layer) const { return Part(residency_, layer); }

 private:
  struct Row {
    std::vector<int32_t> pages;
    std::vector<size_t> begins;  // [layers + 1].
  };
  static absl::Span<const int32_t> Part(const Row& row, int layer) {
    const auto i = static_cast<size_t>(layer);
    return absl::MakeConstSpan(row.pages).subspan(row.begins[i], row.begins[i + 1] - row.begins[i]);
  }

  int64_t total_ = 0;
  std::vector<int64_t> places_;  // Indexed by layer.
  Row latents_, residency_;
};

}  // namespace sluice
