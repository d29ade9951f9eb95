// How places are divided among layers that miss differently. This goes beyond the paper, where all
// layers have the same number. The division follows a profile, which says what each layer misses
// with how many places: a layer whose selection stays misses hardly more with the fewest places,
// and one whose selection moves fast gains with each. This file is arithmetic alone.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Returns EssPoolShape::shares for pools whose mean is that of `even`. With these shares, the
// layers of a step of options.slots sequences take the least time together under their best
// schedules (schedule.h), at the profile's context nearest to max_context. No layer has less than
// the smallest profiled ratio. Returns an empty vector if the profile lacks two ratios below 1 for
// that context and this number of layers, or if the mean is not above the smallest of them.
std::vector<double> DividePlaces(const PolicyOptions& options, const EssPoolShape& even);

// Returns, in ascending order, the ratios below 1 that the profile has for its context nearest to
// max_context, with misses of `layers` layers.
std::vector<double> ProfiledRatios(const MissProfile& profile, int64_t max_context, int layers);

// Returns what a sequence of max_context tokens misses in a step, by layer, with the shape's
// places, according to the profile. Empty if the profile does not say.
std::vector<double> ExpectedMisses(const PolicyOptions& options, const EssPoolShape& shape);

}  // namespace sluice
