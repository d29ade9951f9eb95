// What an NVIDIA GPU ran, through CUPTI's activity records: kernels (those of graphs one by one),
// copies and fills. The library is loaded when it is asked for; nothing depends on it otherwise.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/trace.h"

namespace sluice {

// Of every stream of every context of this process. FAILED_PRECONDITION: there is no CUPTI, or
// there is one trace already.
absl::StatusOr<std::unique_ptr<DeviceTrace>> StartCuptiTrace();

}  // namespace sluice
