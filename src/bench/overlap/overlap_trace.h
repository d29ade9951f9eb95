// Reads a step's transfers from a trace: how fast they were inside the step, and which work could
// hide them. Kernels are recognised by their names on either device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// The transfers of one step.
struct TransfersInside {
  double seconds = 0;  // Time of all its transfers, each from begin to end.
  double calls = 0;
  double compute_seconds = 0;  // Time of all other kernels, each while the stream waited for it.
};
TransfersInside TransfersIn(const StepTrace& part, int layers);
// Returns the transfers that fetch: all but those that a step that fetches nothing has too (the
// write-through of new entries). If lists are empty, the difference of two nearly equal times means
// nothing, so it is never below 0. Returns null if `with` has no more transfers than `without`.
std::optional<TransfersInside> FetchesOf(const TransfersInside& with,
                                         const TransfersInside& without);

// A kernel's seconds per step, while the stream waited for it, in a step that fetches and in one
// that does not. The list is sorted by slowdown, the most slowed first; transfers are not in it.
struct ComparedKernel {
  std::string name;
  double with = 0, without = 0;
};
std::vector<ComparedKernel> ComparedKernels(const StepTrace& with, const StepTrace& without,
                                            int layers);

// The work that can hide a layer's transfer, in seconds, measured in steps that fetch nothing: from
// the indexer's last lists (UpdateResidency) to the end of attention; attention to the fetched
// entries is a small part of it. In two halves, the first half's transfer begins `ahead` earlier.
struct Shelter {
  double beneath = 0;
  double ahead = 0;
  int layers = 0;  // Layers that the means cover; 0: the trace shows none.

  // Returns how much of a layer's transfer of that length can be hidden at best: in one piece, or
  // in two halves, of which the second waits for its lists and for the first.
  double Coverable(double transfer_seconds) const;
};
Shelter ShelterIn(const StepTrace& trace);

// Returns the slices of `trace` that begin in [begin, end), as a trace of one "step".
StepTrace PartOf(const StepTrace& trace, absl::Time begin, absl::Time end);
// Returns how many steps of a model of `layers` layers a part contains, counted by its attention's
// queries: a part need not begin or end with a step.
double StepsIn(const StepTrace& part, int layers);

}  // namespace sluice::bench
