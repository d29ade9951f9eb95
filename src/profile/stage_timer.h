// How long the stages of a layer take under policy ess, inside real decode steps, and the rates
// that they come to (StageRates). By events of the step's own stream, so steps are not recorded:
// what is timed are stages one after the other, with what it takes to launch them where they are
// short.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/ess_probe.h"
#include "src/device/device.h"

namespace sluice {

// A device that records no steps, and is `device` in all else.
std::unique_ptr<Device> UnrecordedDevice(Device* device);

class StageTimer {
 public:
  static constexpr int kTimes = EssProbe::kStages - 1;
  // Mean microseconds of a layer: indexer, UpdateResidency, transfer, PreAttn, attention.
  using LayerTimes = std::array<double, kTimes>;

  StageTimer(Device* device, int layers);

  // EssProbe::on_stage. Engine's thread.
  void OnStage(Stream& stream, int layer, int32_t rows, EssProbe::Stage stage);
  // By layer, of steps of `rows` rows since the last Take; empty: there were none. REQUIRES: every
  // step is done.
  std::vector<LayerTimes> Take();
  // Counts steps of other sizes out.
  void Expect(int32_t rows) { rows_ = rows; }

 private:
  struct StepMarks {
    std::vector<std::unique_ptr<TimedEvent>> events;  // [layers][kStages]
    bool complete = false;
  };
  TimedEvent& At(StepMarks& marks, int layer, int stage) const {
    return *marks.events[static_cast<size_t>(layer * EssProbe::kStages + stage)];
  }
  void Harvest(StepMarks& marks);

  const int layers_;
  int32_t rows_ = 0;
  std::array<StepMarks, 3> marks_;  // of steps, in turn: one more than may be under way
  size_t step_ = 0;
  int64_t steps_ = 0;  // in sums_
  std::vector<LayerTimes> sums_;
};

// The line of least squared distance through (x, y), never below zero; through the origin where
// the x are alike. REQUIRES: as many of each, one at least.
LinearTime FitLine(absl::Span<const double> x, absl::Span<const double> y);

// What a fork and a join add to a recorded step, in microseconds. The device's errors.
absl::StatusOr<double> MeasureBranch(Device& device);

}  // namespace sluice
