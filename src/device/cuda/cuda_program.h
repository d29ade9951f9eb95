// A step as a graph: instantiated once, launched as often as wanted.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "src/device/cuda/cuda_stream.h"

namespace sluice {

// Records what `enqueue` puts on `stream`, instantiates it and uploads it. INTERNAL names the
// operator that could not be recorded.
absl::StatusOr<std::unique_ptr<Program>> RecordCudaProgram(
    CudaStream& stream, const std::function<void(Stream&)>& enqueue);

}  // namespace sluice
