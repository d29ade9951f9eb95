#include "src/profile/stage_timer.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/mailbox.h"
#include "src/device/trace.h"
#include "src/device/worker_team.h"

namespace sluice {
namespace {

class Unrecorded : public Device {
 public:
  explicit Unrecorded(Device* device) : device_(device) {}
  const std::string& name() const override { return device_->name(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string& what) override {
    return device_->Allocate(kind, bytes, what);
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override { return device_->NewStream(kind); }
  std::unique_ptr<Event> NewEvent() override { return device_->NewEvent(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return device_->NewTimedEvent(); }
  KernelSet& kernels() override { return device_->kernels(); }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) override {
    return device_->NewMailbox(options);
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(
      const WorkerTeamOptions& options, std::function<absl::Status(int, int)> work) override {
    return device_->NewWorkerTeam(options, std::move(work));
  }
  int HostThreads() const override { return device_->HostThreads(); }
  HostPlacement Placement() const override { return device_->Placement(); }
  int Processors() const override { return device_->Processors(); }
  DeviceMemory Memory() const override { return device_->Memory(); }
  absl::Status Health() const override { return device_->Health(); }
  int RowBucket(int) const override { return 0; }

 private:
  Device* const device_;
};

double Microseconds(absl::Duration time) { return absl::ToDoubleMicroseconds(time); }

}  // namespace

std::unique_ptr<Device> UnrecordedDevice(Device* device) {
  return std::make_unique<Unrecorded>(device);
}

StageTimer::StageTimer(Device* device, int layers)
    : layers_(layers), sums_(static_cast<size_t>(layers)) {
  for (StepMarks& marks : marks_) {
    for (int i = 0; i < layers * EssProbe::kStages; ++i) {
      marks.events.push_back(device->NewTimedEvent());
    }
  }
}

void StageTimer::OnStage(Stream& stream, int layer, int32_t rows, EssProbe::Stage stage) {
  if (rows != rows_) return;
  const int s = static_cast<int>(stage);
  if (layer == 0 && s == 0) {
    step_ = (step_ + 1) % marks_.size();
    Harvest(marks_[step_]);
  }
  StepMarks& marks = marks_[step_];
  stream.Record(At(marks, layer, s));
  if (layer + 1 == layers_ && s + 1 == EssProbe::kStages) marks.complete = true;
}

void StageTimer::Harvest(StepMarks& marks) {
  if (!std::exchange(marks.complete, false)) return;
  At(marks, layers_ - 1, kTimes).Wait();
  ++steps_;
  for (int layer = 0; layer < layers_; ++layer) {
    for (int s = 0; s < kTimes; ++s) {
      sums_[static_cast<size_t>(layer)][static_cast<size_t>(s)] +=
          Microseconds(At(marks, layer, s + 1).Since(At(marks, layer, s)));
    }
  }
}

std::vector<StageTimer::LayerTimes> StageTimer::Take() {
  for (StepMarks& marks : marks_) Harvest(marks);
  std::vector<LayerTimes> means;
  if (steps_ > 0) means = sums_;
  for (LayerTimes& layer : means) {
    for (double& time : layer) time /= static_cast<double>(steps_);
  }
  steps_ = 0;
  std::fill(sums_.begin(), sums_.end(), LayerTimes{});
  return means;
}

LinearTime FitLine(absl::Span<const double> x, absl::Span<const double> y) {
  SLUICE_CHECK(!x.empty() && x.size() == y.size());
  const auto n = static_cast<double>(x.size());
  double sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sx += x[i];
    sy += y[i];
    sxx += x[i] * x[i];
    sxy += x[i] * y[i];
  }
  constexpr double kAlike = 0.1;  // Share of the largest value.
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  const double through_origin = sxx > 0 ? sxy / sxx : 0;
  if (*most - *least <= kAlike * *most) {
    return *most > 0 ? LinearTime{0, through_origin} : LinearTime{sy / n, 0};
  }
  const double slope = (n * sxy - sx * sy) / (n * sxx - sx * sx);
  if (slope <= 0) return {sy / n, 0};
  const double fixed = (sy - slope * sx) / n;
  return fixed < 0 ? LinearTime{0, through_origin} : LinearTime{fixed, slope};
}

absl::StatusOr<double> MeasureBranch(Device& device) {
  constexpr int kPairs = 64, kRuns = 20;
  constexpr size_t kBytes = 4;
  SLUICE_ASSIGN_OR_RETURN(const Buffer memory,
                          device.Allocate(MemoryKind::kDevice, 2 * 256, "a branch's memory"));
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCompute);
  const std::unique_ptr<TimedEvent> begin = device.NewTimedEvent(), end = device.NewTimedEvent();
  const auto time = [&](bool forks) -> absl::StatusOr<double> {
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Program> program,
                            device.Record(*stream, [&, forks](Stream& s) {
                              for (int i = 0; i < kPairs; ++i) {
                                s.Fill(memory.data(), 1, kBytes);
                                if (forks) {
                                  Stream& branch = s.Branch(1);
                                  branch.After(s);
                                  branch.Fill(memory.as<uint8_t>() + 256, 1, kBytes);
                                }
                                s.Fill(memory.data(), 2, kBytes);
                                if (forks) s.After(s.Branch(1));
                              }
                            }));
    std::vector<double> times;
    for (int run = 0; run <= kRuns; ++run) {
      stream->Record(*begin);
      program->Run(*stream);
      stream->Record(*end);
      end->Wait();
      if (run > 0) times.push_back(Microseconds(end->Since(*begin)));
    }
    std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
    return times[kRuns / 2];
  };
  SLUICE_ASSIGN_OR_RETURN(const double without, time(false));
  SLUICE_ASSIGN_OR_RETURN(const double with, time(true));
  return std::max(0.0, (with - without) / kPairs);
}

}  // namespace sluice
