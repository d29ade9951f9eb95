#include "src/attention/policies/ess/pool_division.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>

#include "kernels/latent_params.h"
#include "src/attention/policies/ess/schedule.h"

namespace sluice {
namespace {

// Misses of every layer by ratio, at one context.
struct Curves {
  int64_t context = 0;
  std::vector<double> ratios;               // Ascending; the last is 1.
  std::vector<std::vector<double>> misses;  // [ratio][layer], descending with the ratio.

  double At(size_t layer, double ratio) const {
    const auto above = std::lower_bound(ratios.begin(), ratios.end(), ratio);
    const auto i = static_cast<size_t>(above - ratios.begin());
    if (i == 0) return misses[0][layer];
    if (i == ratios.size()) return misses[i - 1][layer];
    const double part = (ratio - ratios[i - 1]) / (ratios[i] - ratios[i - 1]);
    return misses[i - 1][layer] + part * (misses[i][layer] - misses[i - 1][layer]);
  }
};

// Returns the profile's points at its context nearest to `context`: for each ratio, the point of
// the largest batch.
std::map<double, const MissProfile::Point*> PointsOf(const MissProfile& profile, int64_t context,
                                                     int layers) {
  const auto far = [&](const MissProfile::Point& point) {
    return std::abs(std::log(static_cast<double>(point.context) / static_cast<double>(context)));
  };
  int64_t nearest = 0;
  double least = std::numeric_limits<double>::infinity();
  for (const MissProfile::Point& point : profile.points) {
    if (far(point) < least) {
      least = far(point);
      nearest = point.context;
    }
  }
  std::map<double, const MissProfile::Point*> points;
  for (const MissProfile::Point& point : profile.points) {
    if (point.context != nearest || point.ratio >= 1 ||
        point.by_layer.size() != static_cast<size_t>(layers)) {
      continue;
    }
    const MissProfile::Point*& of_ratio = points[point.ratio];
    if (of_ratio == nullptr || of_ratio->batch < point.batch) of_ratio = &point;
  }
  return points;
}

// Returns curves with empty `ratios` if the profile does not say.
Curves CurvesOf(const MissProfile& profile, int64_t context, int layers) {
  Curves curves;
  const auto points = PointsOf(profile, context, layers);
  if (points.size() < 2) return curves;
  curves.context = points.begin()->second->context;
  for (const auto& [ratio, point] : points) {
    curves.ratios.push_back(ratio);
    curves.misses.push_back(point->by_layer);
    if (curves.misses.size() == 1) continue;
    std::vector<double>& now = curves.misses.back();
    const std::vector<double>& before = curves.misses[curves.misses.size() - 2];
    for (size_t layer = 0; layer < now.size(); ++layer) {
      now[layer] = std::min(now[layer], before[layer]);
    }
  }
  curves.ratios.push_back(1);
  curves.misses.emplace_back(static_cast<size_t>(layers), 0.0);
  return curves;
}

// A stretch of a layer's curve of times on which each further place gains the same.
struct Stretch {
  size_t layer = 0;
  double ratio = 0;  // Length of the stretch.
  double gain = 0;   // Microseconds gained per ratio of 1.
};

// Appends the lower convex hull of a layer's time over its ratio.
void AddHull(size_t layer, const std::vector<double>& ratios, const std::vector<double>& times,
             std::vector<Stretch>* out) {
  for (size_t i = 0; i + 1 < ratios.size();) {
    size_t best = i + 1;
    double gain = -std::numeric_limits<double>::infinity();
    for (size_t j = i + 1; j < ratios.size(); ++j) {
      const double g = (times[i] - times[j]) / (ratios[j] - ratios[i]);
      if (g >= gain) {
        gain = g;
        best = j;
      }
    }
    out->push_back({layer, ratios[best] - ratios[i], gain});
    i = best;
  }
}

}  // namespace

std::vector<double> ProfiledRatios(const MissProfile& profile, int64_t max_context, int layers) {
  std::vector<double> ratios;
  for (const auto& [ratio, point] : PointsOf(profile, max_context, layers)) ratios.push_back(ratio);
  return ratios;
}

std::vector<double> DividePlaces(const PolicyOptions& options, const EssPoolShape& even) {
  constexpr int kSteps = 128;  // Points at which a curve is sampled.
  const Curves curves = CurvesOf(options.ess.profile, even.max_context, even.layers);
  if (curves.ratios.empty()) return {};
  const auto context = static_cast<double>(even.max_context);
  const double mean = static_cast<double>(even.PlacesOf(even.max_context)) / context;
  const double least = std::max(curves.ratios.front(),
                                static_cast<double>(even.NeededPlaces(even.max_context)) / context);
  if (mean <= least || mean >= 1) return {};

  StageRates rates = options.ess.profile.rates;
  if (rates.device.empty()) {
    rates = AssumedRates(kernels::kPackedEntryBytes,
                         kernels::IndexKeyBytes(kernels::DType::kFloat8E4M3));
  }
  const auto layers = static_cast<size_t>(even.layers);
  std::vector<Stretch> stretches;
  std::vector<double> ratios(kSteps + 1), times(kSteps + 1);
  for (size_t layer = 0; layer < layers; ++layer) {
    for (size_t i = 0; i <= kSteps; ++i) {
      ratios[i] = least + (1 - least) * static_cast<double>(i) / kSteps;
      const LayerLoad load{curves.At(layer, ratios[i]), static_cast<double>(curves.context),
                           static_cast<double>(options.index_top_k)};
      const StageTimes stages = TimesOf(rates, load, options.slots);
      times[i] = AddedTime(ChooseOverlap(stages, options.slots), stages);
    }
    AddHull(layer, ratios, times, &stretches);
  }
  std::stable_sort(stretches.begin(), stretches.end(),
                   [](const Stretch& a, const Stretch& b) { return a.gain > b.gain; });
  std::vector<double> shares(layers, least);
  double left = (mean - least) * static_cast<double>(layers);
  for (const Stretch& stretch : stretches) {
    const double given = std::min(stretch.ratio, left);
    shares[stretch.layer] += given;
    left -= given;
  }
  return shares;
}

std::vector<double> ExpectedMisses(const PolicyOptions& options, const EssPoolShape& shape) {
  const Curves curves = CurvesOf(options.ess.profile, shape.max_context, shape.layers);
  std::vector<double> misses;
  if (curves.ratios.empty()) return misses;
  const std::vector<int64_t> places = shape.PlacesByLayer(shape.max_context);
  for (size_t layer = 0; layer < places.size(); ++layer) {
    misses.push_back(curves.At(
        layer, static_cast<double>(places[layer]) / static_cast<double>(shape.max_context)));
  }
  return misses;
}

}  // namespace sluice
