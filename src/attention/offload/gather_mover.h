// The mover by way of the CPU (PolicyOptions::Mover::kCpu). RowMover::Create is the way to it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/row_mover.h"

namespace sluice {

// Returns the errors of RowMover::Create.
absl::StatusOr<std::unique_ptr<RowMover>> NewGatherMover(const RowMover::Options& options);

}  // namespace sluice
