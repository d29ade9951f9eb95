// Tests that hold for every device with streams of its own.
#pragma once

#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "src/device/device.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {

inline void OnDevice(const std::string& kernels, void (*test)(Device&)) {
  const auto device = testing::TestDevice(kernels, /*threads=*/2);
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  test(**device);
  CHECK((*device)->Health().ok());
}

// Makes one test case per device, so that devices that a machine lacks are counted.
#define SLUICE_TEST_ON_EVERY_DEVICE(claim, test)                        \
  TEST_CASE(claim " (cpu)", "[device]") { OnDevice("portable", test); } \
  TEST_CASE(claim " (cuda)", "[device][cuda]") { OnDevice("cuda", test); }

}  // namespace sluice
