// A trace of what ran on a device's streams, and when: the device's part of a step's trace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace sluice {

// A kernel, a copy or a fill, from its first to its last moment on the device, by the host's clock
// (absl::Now()). Slices of one stream may overlap by a little: a kernel may begin while the one
// before it ends.
struct TraceSlice {
  enum class Kind { kKernel, kCopy, kFill };
  Kind kind = Kind::kKernel;
  std::string name;
  uint32_t stream = 0;
  absl::Time begin, end;
  int64_t bytes = 0;  // bytes of a copy or fill
  // Slices that were launched as one (a graph) share this number; 0: launched alone.
  uint64_t launch = 0;
};
// Returns "kernel", "copy" or "fill".
const char* SliceKindName(TraceSlice::Kind kind);

// Records all that runs on a device's streams while it is alive. Any thread may use it. A process
// has at most one at a time.
class DeviceTrace {
 public:
  virtual ~DeviceTrace() = default;
  // Ends the trace and returns its slices, in no particular order. REQUIRES: the streams are idle;
  // called once.
  virtual absl::StatusOr<std::vector<TraceSlice>> Stop() = 0;
};

// Returns a kernel's demangled signature without the parts that all of ours share: "void
// sluice::kernels::cuda::(anonymous namespace)::RmsNorm<8>(sluice::kernels::RmsNormParams)" gives
// "RmsNorm<8>".
std::string ShortKernelName(const std::string& signature);

}  // namespace sluice
