// Chooses how units come over the link (row_mover.h): as an option says, or by a measurement of
// both ways on this very machine, with the policy's own memory.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/row_mover.h"
#include "src/attention/policy_statistics.h"

namespace sluice {

// The memory of a trial, counted from the bases of RowMover::Options.
struct MoverTrial {
  int64_t source_units = 0;  // the whole arena
  int64_t target_units = 0;  // their contents are lost
};

struct ChosenMover {
  std::unique_ptr<RowMover> mover;
  LinkStatistics link;
};

// Measures both movers for some 100 ms, with units that lie scattered over the whole arena as
// those of a step do. A mover whose worker failed has a rate of 0. Returns the errors of
// RowMover::Create, and the device's where a measurement broke it.
absl::StatusOr<LinkStatistics> MeasureMovers(const RowMover::Options& options,
                                             const MoverTrial& trial);

// Returns kCpu where that is faster by a tenth, else kUva, which leaves the CPU alone.
PolicyOptions::Mover FasterMover(const LinkStatistics& measured);

// Makes the mover that `options.kind` asks for; with kAuto, the faster one. On a device whose
// memory is the host's nothing is measured, and that is kUva. Returns the errors of the above.
absl::StatusOr<ChosenMover> ChooseMover(const RowMover::Options& options, const MoverTrial& trial);

}  // namespace sluice
