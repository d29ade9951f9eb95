#include "src/attention/policies/ess/overlap_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

OverlapPlan::OverlapPlan(const Options& options)
    : options_(options),
      plans_(static_cast<size_t>(options.max_rows) + 1),
      best_(static_cast<size_t>(options.layers)),
      prefetch_(static_cast<size_t>(options.layers), options.prefetch),
      context_(static_cast<double>(options.context)),
      last_(static_cast<size_t>(options.layers)) {
  for (Plan& plan : plans_) plan.layers.resize(best_.size(), Overlap::kDa);
  misses_.reserve(best_.size());
  if (!options.prefetch || options.profile.points.empty()) return;
  for (size_t layer = 0; layer < prefetch_.size(); ++layer) {
    const StageTimes times = TimesOfLayer(layer, options.max_rows);
    prefetch_[layer] = times.transfer > times.attend;
  }
}

StageTimes OverlapPlan::TimesOfLayer(size_t layer, int rows) const {
  LayerLoad load;
  load.context = context_;
  load.selected = std::min(context_, options_.selected);
  if (seen_) {
    load.misses = misses_[layer];
  } else if (options_.ratio < 1) {
    const MissProfile::Point* const point =
        options_.profile.Nearest(options_.context, options_.ratio, rows);
    if (point != nullptr) load.misses = point->by_layer[layer];
  }
  return TimesOf(options_.rates, load, rows);
}

void OverlapPlan::Choose(int rows, std::vector<Overlap>* layers) const {
  using Choice = PolicyOptions::Ess::Overlap;
  const bool expects = seen_ || options_.ratio >= 1 || !options_.profile.points.empty();
  for (size_t layer = 0; layer < layers->size(); ++layer) {
    Overlap& overlap = (*layers)[layer];
    switch (options_.overlap) {
      case Choice::kNone:
        overlap = Overlap::kNone;
        break;
      case Choice::kDa:
        overlap = Overlap::kDa;
        break;
      case Choice::kDba:
        overlap = rows < 2 ? Overlap::kDa : Overlap::kDba;
        break;
      case Choice::kLayerWise:
        overlap = expects ? ChooseOverlap(TimesOfLayer(layer, rows), rows) : Overlap::kDa;
        break;
    }
  }
}

absl::Span<const Overlap> OverlapPlan::Of(int rows) {
  SLUICE_CHECK(rows > 0 && rows < static_cast<int>(plans_.size()));
  Plan& plan = plans_[static_cast<size_t>(rows)];
  if (!plan.chosen) {
    Choose(rows, &plan.layers);
    plan.chosen = true;
    plan.judged = looks_;
    Publish(rows);
  }
  return plan.layers;
}

void OverlapPlan::Observe(const PolicyStatistics& sums, double context) {
  SLUICE_CHECK(sums.layers.size() == last_.size());
  // All layers have seen the same rows, so the first one tells.
  if (sums.layers[0].steps - last_[0].steps < kLeastRows) return;
  const bool first = !seen_ && options_.profile.points.empty();
  if (!seen_) {  // The average begins with what was expected.
    misses_.assign(last_.size(), 0);
    const MissProfile::Point* const point =
        options_.ratio < 1 ? options_.profile.Nearest(options_.context, options_.ratio, 1)
                           : nullptr;
    if (point != nullptr) misses_ = point->by_layer;
    seen_ = true;
  }
  for (size_t layer = 0; layer < last_.size(); ++layer) {
    const PolicyStatistics::Layer& now = sums.layers[layer];
    const double missed = static_cast<double>(now.missing - last_[layer].missing) /
                          static_cast<double>(now.steps - last_[layer].steps);
    misses_[layer] += (first ? 1 : kWeight) * (missed - misses_[layer]);
    last_[layer] = now;
  }
  context_ = context;
  ++looks_;
}

double OverlapPlan::AddedTimeOf(absl::Span<const Overlap> schedules, int rows) const {
  double sum = 0;
  for (size_t layer = 0; layer < schedules.size(); ++layer) {
    sum += AddedTime(schedules[layer], TimesOfLayer(layer, rows));
  }
  return sum;
}

bool OverlapPlan::Change(int rows) {
  if (rows == 0) return false;
  Plan& plan = plans_[static_cast<size_t>(rows)];
  if (plan.chosen && rows != shown_) Publish(rows);
  if (!adapts() || !seen_ || !plan.chosen || plan.judged == looks_ || looks_ < kSettleLooks) {
    return false;
  }
  if (plan.changed > 0 && looks_ - plan.changed < kHoldLooks) return false;
  plan.judged = looks_;
  Choose(rows, &best_);
  const double gain = AddedTimeOf(plan.layers, rows) - AddedTimeOf(best_, rows);
  if (gain < kLeastGainUs * static_cast<double>(best_.size())) return false;
  std::swap(plan.layers, best_);
  plan.changed = looks_;
  changes_.fetch_add(1, std::memory_order_relaxed);
  Publish(rows);
  return true;
}

void OverlapPlan::Publish(int rows) {
  shown_ = rows;
  const std::vector<Overlap>& layers = plans_[static_cast<size_t>(rows)].layers;
  for (size_t i = 0; i < counts_.size(); ++i) {
    counts_[i].store(
        static_cast<int>(std::count(layers.begin(), layers.end(), static_cast<Overlap>(i))),
        std::memory_order_relaxed);
  }
}

ScheduleStatistics OverlapPlan::statistics() const {
  ScheduleStatistics out;
  for (size_t i = 0; i < counts_.size(); ++i) {
    out.layers[i] = counts_[i].load(std::memory_order_relaxed);
  }
  out.changes = changes_.load(std::memory_order_relaxed);
  return out;
}

std::string LayersBySchedule(absl::Span<const Overlap> schedules) {
  std::string out;
  for (size_t i = 0; i < ScheduleStatistics::kSchedules; ++i) {
    std::string layers;
    for (size_t begin = 0, end; begin < schedules.size(); begin = end) {
      end = begin + 1;
      if (schedules[begin] != static_cast<Overlap>(i)) continue;
      while (end < schedules.size() && schedules[end] == schedules[begin]) ++end;
      absl::StrAppend(&layers, " ", begin);
      if (end - begin > 1) absl::StrAppend(&layers, "-", end - 1);
    }
    if (layers.empty()) continue;
    absl::StrAppend(&out, out.empty() ? "" : ", ", ScheduleStatistics::kNames[i], layers);
  }
  return out;
}

}  // namespace sluice
