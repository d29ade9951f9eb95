// The rates at which this machine's memories are read and copied, measured in about a second. A
// node forecasts its policies from them (src/model/policy_forecast.h), and benches the floors of
// their steps.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/statusor.h"
#include "src/device/device.h"

namespace sluice {

// Bytes per second, or bytes.
struct MemoryTraffic {
  double hbm = 0;
  double to_device = 0;  // over the link, from DRAM to HBM
  double to_host = 0;
  double dram = 0;  // bytes read by the host's threads
};

struct DeviceRates {
  MemoryTraffic memory;         // bytes per second
  double operator_seconds = 0;  // time of an operator that does next to nothing, in a recorded step
  bool one_memory = false;      // the device has no memory of its own: what it reads is DRAM
};

struct RateOptions {
  // Returns the bytes per second at which the device reads `bytes` bytes of its own memory.
  std::function<absl::StatusOr<double>(size_t bytes)> read_device;
  int workers = 1;            // threads that read DRAM together, as the policy's workers do
  size_t device_bytes = 0;    // bytes that read_device is asked for
  size_t link_bytes = 0;      // bytes that are copied each way
  size_t dram_bytes = 0;      // bytes of DRAM that are read: more than the processor's caches
  double read_seconds = 0.1;  // how long DRAM is read
};

// RESOURCE_EXHAUSTED: there is no memory for the probes.
absl::StatusOr<DeviceRates> MeasureDeviceRates(Device& device, const RateOptions& options);

}  // namespace sluice
