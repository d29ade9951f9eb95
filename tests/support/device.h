// A device for a test, by the name of its kernels.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/device/device.h"

namespace sluice::testing {

// `kernels`: "cuda", or kernels of the CPU device, "auto" too. NOT_FOUND where this machine or this
// build has none of them: a test that needs them is skipped, with the message.
// `threads`, `row_bucket`: of the CPU device.
absl::StatusOr<std::unique_ptr<Device>> TestDevice(const std::string& kernels, int threads = 1,
                                                   int row_bucket = 0);

}  // namespace sluice::testing
