// Tests the probes of a device's and the host's memories.
#include "src/device/memory_rates.h"

#include <catch2/catch.hpp>

#include "tests/unit/device/devices.h"

namespace sluice {
namespace {

RateOptions Small() {
  RateOptions options;
  options.workers = 2;
  options.device_bytes = size_t{4} << 20;
  options.link_bytes = size_t{4} << 20;
  options.dram_bytes = size_t{8} << 20;
  options.read_seconds = 0.01;
  return options;
}

void EveryRateIsMeasured(Device& device) {
  RateOptions options = Small();
  size_t asked = 0;
  options.read_device = [&](size_t bytes) -> absl::StatusOr<double> {
    asked = bytes;
    return 123e9;
  };
  const auto rates = MeasureDeviceRates(device, options);
  INFO(rates.status());
  REQUIRE(rates.ok());
  CHECK(asked == options.device_bytes);
  CHECK(rates->memory.hbm == 123e9);
  // Between a floppy disk and anything that there is.
  for (const double rate : {rates->memory.to_device, rates->memory.to_host, rates->memory.dram}) {
    CHECK(rate > 1e6);
    CHECK(rate < 1e14);
  }
  CHECK(rates->operator_seconds > 0);
  CHECK(rates->operator_seconds < 0.1);
  CHECK(rates->one_memory == (device.Memory().total_bytes == 0));
}
SLUICE_TEST_ON_EVERY_DEVICE("the rate of every memory is measured", EveryRateIsMeasured)

void AFailedProbeIsAnError(Device& device) {
  RateOptions options = Small();
  options.read_device = [](size_t) -> absl::StatusOr<double> {
    return absl::InternalError("no probe");
  };
  CHECK(MeasureDeviceRates(device, options).status().message() == "no probe");
}
SLUICE_TEST_ON_EVERY_DEVICE("a probe that fails is an error", AFailedProbeIsAnError)

}  // namespace
}  // namespace sluice
