// Tests of CPU workers run on every path: workers have the kernels of the path, and the device is
// the path's.
#pragma once

#include <catch2/catch.hpp>
#include <string>

#include "kernels/kernel_table.h"
#include "src/device/device.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice::testing {

inline void OnPath(const std::string& name, void (*test)(Device&, const kernels::KernelTable&)) {
  const auto device = TestDevice(name);
  if (absl::IsNotFound(device.status())) return SkipTest(std::string(device.status().message()));
  REQUIRE(device.ok());
  // Workers are the CPU's, whatever the device is.
  const kernels::KernelTable* table = kernels::FindKernelTable(name.c_str());
  if (table == nullptr) table = kernels::AvailableKernelTables().back();
  test(**device, *table);
}

}  // namespace sluice::testing

#define SLUICE_TEST_ON_EVERY_PATH(claim, test)                                        \
  TEST_CASE(claim " (portable)") { ::sluice::testing::OnPath("portable", test); }     \
  TEST_CASE(claim " (avx2)") { ::sluice::testing::OnPath("avx2", test); }             \
  TEST_CASE(claim " (avx512bf16)") { ::sluice::testing::OnPath("avx512bf16", test); } \
  TEST_CASE(claim " (amx)") { ::sluice::testing::OnPath("amx", test); }               \
  TEST_CASE(claim " (cuda)", "[cuda]") { ::sluice::testing::OnPath("cuda", test); }
