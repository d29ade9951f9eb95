#include "src/attention/policies/ess/selection_reuse.h"

#include <algorithm>
#include <cstddef>

#include "src/base/status_macros.h"

namespace sluice {

SelectionReuse::SelectionReuse(int layers, int top_k)
    : top_k_(top_k), layers_(static_cast<size_t>(layers)) {}

void SelectionReuse::Begin() {
  steps_ = 0;
  before_ = 0;
  for (Layer& layer : layers_) {
    layer.last.clear();
    layer.used.clear();
  }
}

void SelectionReuse::Use(Layer& layer, size_t entry) {
  int32_t& last = layer.last[entry];
  if (last >= 0) --layer.used[static_cast<size_t>(last)];
  last = steps_;
  ++layer.used.back();
}

void SelectionReuse::Add(int64_t tokens, absl::Span<const int32_t> selected) {
  const bool counts = steps_ >= kWarmSteps && !done();
  const auto count = static_cast<size_t>(std::min<int64_t>(tokens, top_k_));
  std::array<int64_t, kRatios.size()> places;
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = static_cast<int64_t>(kRatios[i] * static_cast<double>(tokens));
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    const auto list = selected.subspan(l * static_cast<size_t>(top_k_), count);
    layer.last.resize(static_cast<size_t>(tokens), -1);
    layer.used.push_back(0);
    // New tokens' entries are written to their places, not fetched.
    for (int64_t t = before_ == 0 ? tokens - 1 : before_; t < tokens; ++t) {
      Use(layer, static_cast<size_t>(t));
    }
    if (counts) {
      const size_t steps = layer.used.size();
      lookups_.assign(steps, 0);
      int64_t first = 0;  // lookups of entries that were never used
      for (const int32_t entry : list) {
        const int32_t last = layer.last[static_cast<size_t>(entry)];
        ++(last < 0 ? first : lookups_[static_cast<size_t>(last)]);
      }
      since_.assign(steps, 0);
      int64_t since = 0;
      for (size_t step = steps; step-- > 0;) since_[step] = since += layer.used[step];
      for (size_t i = 0; i < places.size(); ++i) {
        layer.missed[i] += first;
        for (size_t step = 0; step < steps && since_[step] > places[i]; ++step) {
          layer.missed[i] += lookups_[step];
        }
      }
    }
    for (const int32_t entry : list) Use(layer, static_cast<size_t>(entry));
  }
  ++steps_;
  before_ = tokens;
  if (!counts) return;
  ++counted_;
  tokens_ += tokens;
}

std::vector<MissProfile::Point> SelectionReuse::Points() const {
  SLUICE_CHECK(done(), "too few steps were counted");
  std::vector<MissProfile::Point> points;
  for (size_t i = 0; i < kRatios.size(); ++i) {
    MissProfile::Point& point = points.emplace_back();
    point.context = tokens_ / counted_;
    point.ratio = kRatios[i];
    point.batch = 1;
    for (const Layer& layer : layers_) {
      point.by_layer.push_back(static_cast<double>(layer.missed[i]) /
                               static_cast<double>(counted_));
    }
  }
  return points;
}

}  // namespace sluice
