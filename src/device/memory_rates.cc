#include "src/device/memory_rates.h"

#include <memory>
#include <vector>

#include "src/base/status_macros.h"
#include "src/base/timing.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr int kRounds = 7;

// Returns the seconds, by the device's clock, of what `enqueue` puts on the stream: the median of
// several rounds.
double SecondsOf(Device& device, Stream& stream, const std::function<void()>& enqueue) {
  const std::unique_ptr<TimedEvent> begin = device.NewTimedEvent(), end = device.NewTimedEvent();
  std::vector<double> seconds;
  for (int i = 0; i < kRounds; ++i) {
    stream.Record(*begin);
    enqueue();
    stream.Record(*end);
    end->Wait();
    begin->Wait();
    seconds.push_back(absl::ToDoubleSeconds(end->Since(*begin)));
  }
  return TimingOf(seconds).median;
}

// Returns the seconds of one of many small operators in a recorded sequence.
absl::StatusOr<double> OperatorSeconds(Device& device) {
  constexpr int kOperators = 256;
  constexpr int32_t kDim = 64;
  SLUICE_ASSIGN_OR_RETURN(
      const Buffer values,
      device.Allocate(MemoryKind::kDevice, 3 * kDim * sizeof(float), "a probe of operators"));
  kernels::RmsNormParams norm{};
  norm.x = values.as<float>();
  norm.weight = norm.x + kDim;
  norm.out = values.as<float>() + 2 * kDim;
  norm.x_stride = kDim;
  norm.rows = 1;
  norm.dim = kDim;
  norm.epsilon = 1e-6f;
  norm.out_type = device.kernels().activation_type();
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCompute);
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Program> program,
                          device.Record(*stream, [&](Stream& recorded) {
                            for (int i = 0; i < kOperators; ++i) {
                              device.kernels().RmsNorm(recorded, norm);
                            }
                          }));
  return SecondsOf(device, *stream, [&] { program->Run(*stream); }) / kOperators;
}

}  // namespace

absl::StatusOr<DeviceRates> MeasureDeviceRates(Device& device, const RateOptions& options) {
  DeviceRates rates;
  rates.one_memory = device.Memory().total_bytes == 0;
  SLUICE_ASSIGN_OR_RETURN(rates.memory.hbm, options.read_device(options.device_bytes));
  {
    const auto allocate = [&](MemoryKind kind) {
      return device.Allocate(kind, options.link_bytes, "a probe of the link");
    };
    SLUICE_ASSIGN_OR_RETURN(const Buffer there, allocate(MemoryKind::kDevice));
    SLUICE_ASSIGN_OR_RETURN(const Buffer here, allocate(MemoryKind::kPinned));
    const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCopy);
    const auto copied = [&](const Buffer& target, const Buffer& source) {
      return static_cast<double>(target.bytes()) / SecondsOf(device, *stream, [&] {
               stream->Copy(target.data(), source.data(), target.bytes());
             });
    };
    rates.memory.to_device = copied(there, here);
    rates.memory.to_host = copied(here, there);
  }
  SLUICE_ASSIGN_OR_RETURN(rates.operator_seconds, OperatorSeconds(device));
  SLUICE_RETURN_IF_ERROR(device.Health());
  const HugeBuffer buffer(options.dram_bytes);
  Crew crew(options.workers);
  rates.memory.dram = static_cast<double>(options.dram_bytes) /
                      MeasureRead(crew, buffer, options.dram_bytes, options.read_seconds).median;
  return rates;
}

}  // namespace sluice
