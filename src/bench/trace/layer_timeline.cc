#include "src/bench/trace/layer_timeline.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "src/base/timing.h"

namespace sluice::bench {
namespace {

constexpr size_t kShownLayers = 3;

}  // namespace

nlohmann::json LayerTimeline(const StepTrace& trace, int layers) {
  std::map<std::string, std::vector<absl::Time>> begins;
  for (const TraceSlice& slice : trace.device) {
    if (slice.kind == TraceSlice::Kind::kKernel) begins[slice.name].push_back(slice.begin);
  }
  // The stretch may cut a step at either end.
  const std::vector<absl::Time>* anchors = nullptr;
  std::string anchor;
  for (auto& [name, times] : begins) {
    const int64_t off =
        std::abs(static_cast<int64_t>(times.size()) - int64_t{layers} * trace.steps);
    if (off >= layers || times.size() < 2 * kShownLayers) continue;
    std::sort(times.begin(), times.end());
    if (anchors != nullptr && anchors->front() <= times.front()) continue;
    anchors = &times;
    anchor = name;
  }
  if (anchors == nullptr) return nullptr;
  std::vector<double> lengths;
  for (size_t i = 1; i < anchors->size(); ++i) {
    lengths.push_back(absl::ToDoubleSeconds((*anchors)[i] - (*anchors)[i - 1]));
  }
  const Timing length = TimingOf(lengths);
  // Shows the stretch of three layers with the median length, which does not contain the end of a
  // step.
  std::vector<std::pair<absl::Duration, size_t>> stretches;
  for (size_t i = 0; i + kShownLayers < anchors->size(); ++i) {
    stretches.emplace_back((*anchors)[i + kShownLayers] - (*anchors)[i], i);
  }
  std::sort(stretches.begin(), stretches.end());
  const size_t shown = stretches[stretches.size() / 2].second;
  const absl::Time first = (*anchors)[shown], last = (*anchors)[shown + kShownLayers];
  nlohmann::json slices = nlohmann::json::array();
  for (const TraceSlice& slice : trace.device) {
    if (slice.end <= first || slice.begin >= last) continue;
    slices.push_back({{"stream", slice.stream},
                      {"name", slice.name},
                      {"kind", SliceKindName(slice.kind)},
                      {"begin", absl::ToDoubleSeconds(slice.begin - first)},
                      {"end", absl::ToDoubleSeconds(slice.end - first)}});
  }
  return {{"anchor", anchor},
          {"layer_seconds", {{"median", length.median}, {"p10", length.low}, {"p90", length.high}}},
          {"slices", std::move(slices)}};
}

}  // namespace sluice::bench
