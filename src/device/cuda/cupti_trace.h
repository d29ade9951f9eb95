// A trace of what an NVIDIA GPU ran, from CUPTI's activity records: kernels (those of graphs one by
// one), copies and fills. The library is loaded when a trace is asked for; nothing else depends on
// it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/trace.h"

namespace sluice {

// Traces every stream of every context of this process. FAILED_PRECONDITION: there is no CUPTI, or
// a trace is already under way.
absl::StatusOr<std::unique_ptr<DeviceTrace>> StartCuptiTrace();

}  // namespace sluice
