// What a trace of a step says of its transfers: how fast they were inside it, and what they could
// run beneath. Kernels are told apart by their names, on either device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// Of a step.
struct TransfersInside {
  double seconds = 0;  // of all its transfers, each from its begin to its end
  double calls = 0;
  double compute_seconds = 0;  // of all other kernels, while each was the one to wait for
};
TransfersInside TransfersIn(const StepTrace& part, int layers);
// Of a step's transfers those that fetch: all but what a step that fetches nothing has too (the way
// home of new entries). Where lists are empty the difference of two nearly equal times says
// nothing: it is never below 0. Null: as many transfers as without.
std::optional<TransfersInside> FetchesOf(const TransfersInside& with,
                                         const TransfersInside& without);

// Seconds of a step that a kernel was the one to wait for, in a step that fetches and in one that
// does not; by name, the most slowed first. Transfers are none.
struct ComparedKernel {
  std::string name;
  double with = 0, without = 0;
};
std::vector<ComparedKernel> ComparedKernels(const StepTrace& with, const StepTrace& without,
                                            int layers);

// What a transfer of a layer can run beneath, in seconds, as measured in steps that fetch nothing:
// from where the indexer's last lists are made (UpdateResidency) to the end of attention, of which
// what arrives is a small part. In two halves the first half's transfer begins `ahead` earlier.
struct Shelter {
  double beneath = 0;
  double ahead = 0;
  int layers = 0;  // that it is the mean of; 0: the trace shows none

  // The part of a layer's transfer of that length that it hides at best: in one piece, or in two
  // halves, of which the second waits for its lists and for the first.
  double Coverable(double transfer_seconds) const;
};
Shelter ShelterIn(const StepTrace& trace);

// The slices of `trace` that begin in [begin, end), as a trace of its own of one "step".
StepTrace PartOf(const StepTrace& trace, absl::Time begin, absl::Time end);
// How many steps of a model of `layers` layers a part has, by its attention's queries: a part need
// not begin or end with a step.
double StepsIn(const StepTrace& part, int layers);

}  // namespace sluice::bench
