#include "src/attention/policies/ess/pool_pages.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

PoolPages::PoolPages(const EssPoolShape& shape, const SequenceCache& hbm, int64_t total)
    : total_(total), places_(shape.PlacesByLayer(total)) {
  const auto divide = [&](size_t kind, auto pages_of, Row* row) {
    row->begins.assign(1, 0);
    for (int layer = 0; layer < shape.layers; ++layer) {
      const std::vector<int32_t>& pages = hbm.Pages(layer, kind);
      row->pages.insert(row->pages.end(), pages.begin(), pages.end());
      row->begins.push_back(row->begins.back() + static_cast<size_t>(pages_of(layer)));
    }
    SLUICE_CHECK(row->begins.back() <= row->pages.size());
  };
  divide(
      kLatentKind, [&](int layer) { return places(layer) / shape.block_tokens; }, &latents_);
  divide(
      kResidencyKind, [&](int layer) { return shape.ResidencyPages(total, layer, places(layer)); },
      &residency_);
}

int64_t PoolPages::most_places() const { return *std::max_element(places_.begin(), places_.end()); }

}  // namespace sluice
