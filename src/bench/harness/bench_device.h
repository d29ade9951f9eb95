// The device that a bench runs on, and the rate at which the device reads its own memory: the floor
// of every memory-bound operation follows from that rate.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "src/device/device.h"
#include "src/device/memory_rates.h"

namespace sluice::bench {

class BenchDevice {
 public:
  struct Options {
    std::string name = "cpu";      // or "cuda"
    std::string kernels = "auto";  // CPU kernels.
    int threads = 1;               // Threads that compute on the CPU.
  };
  // Returns the device's errors, and INVALID_ARGUMENT if this build has no such device.
  static absl::StatusOr<std::unique_ptr<BenchDevice>> Create(const Options& options);
  virtual ~BenchDevice() = default;

  virtual Device& device() = 0;
  // Returns what computes: {"gpu", "NVIDIA H100 80GB HBM3"}, or the kernels and threads.
  virtual std::vector<std::pair<std::string, std::string>> Shape() const = 0;
  // Returns the bytes per second at which code that does nothing else reads `bytes` bytes of the
  // device's memory again and again: the median over a time long enough to be steady.
  virtual absl::StatusOr<double> ReadRate(size_t bytes) = 0;

  // Measures the rates of the machine's memories; `workers` threads read DRAM together, as a
  // policy's workers do.
  absl::StatusOr<DeviceRates> MeasureRates(int workers);
};

}  // namespace sluice::bench
