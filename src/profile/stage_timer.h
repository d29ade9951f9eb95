// Measures how long the stages of a layer take under policy ess, inside real decode steps, and the
// rates that these times give (StageRates). It uses events of the step's own stream, so steps are
// not recorded: the measured stages follow one another, and short ones include what it takes to
// launch them.
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

// Returns a device that records no steps and is `device` in all else.
std::unique_ptr<Device> UnrecordedDevice(Device* device);

class StageTimer {
 public:
  static constexpr int kTimes = EssProbe::kStages - 1;
  // Mean microseconds of a layer: indexer, UpdateResidency, transfer, PreAttn, attention.
  using LayerTimes = std::array<double, kTimes>;

  StageTimer(Device* device, int layers);

  // A function for EssProbe::on_stage. Only the engine's thread calls it.
  void OnStage(Stream& stream, int layer, int32_t rows, EssProbe::Stage stage);
  // Returns the times by layer, of steps of the expected number of rows since the last Take. Empty
  // if there were none. REQUIRES: every step is done.
  std::vector<LayerTimes> Take();
  // Ignores steps of other sizes than `rows` from now on.
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
  // Marks of steps, used in turn: one more than the steps that may be under way.
  std::array<StepMarks, 3> marks_;
  size_t step_ = 0;
  int64_t steps_ = 0;  // Steps summed in sums_.
  std::vector<LayerTimes> sums_;
};

// Returns the line of least squared distance through (x, y), never below zero, and through the
// origin if the x are alike. REQUIRES: x and y have the same size, at least one.
LinearTime FitLine(absl::Span<const double> x, absl::Span<const double> y);

// Returns what a fork and a join add to a recorded step, in microseconds, or the device's errors.
absl::StatusOr<double> MeasureBranch(Device& device);

}  // namespace sluice
