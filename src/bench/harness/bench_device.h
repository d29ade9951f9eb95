// The device that a bench runs on, and the rate at which that device reads its own memory: what the
// floor of everything that is bound by memory is made of.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "src/device/device.h"

namespace sluice::bench {

class BenchDevice {
 public:
  struct Options {
    std::string name = "cpu";      // or "cuda"
    std::string kernels = "auto";  // CPU kernels
    int threads = 1;               // that compute on the CPU
  };
  // The device's errors; INVALID_ARGUMENT where this build has no such device.
  static absl::StatusOr<std::unique_ptr<BenchDevice>> Create(const Options& options);
  virtual ~BenchDevice() = default;

  virtual Device& device() = 0;
  // What computes: {"gpu", "NVIDIA H100 80GB HBM3"}, or kernels and threads.
  virtual std::vector<std::pair<std::string, std::string>> Shape() const = 0;
  // Bytes per second at which `bytes` bytes of the device's memory are read, again and again, by
  // code that does nothing else: the median of a time long enough to be steady.
  virtual absl::StatusOr<double> ReadRate(size_t bytes) = 0;
};

}  // namespace sluice::bench
