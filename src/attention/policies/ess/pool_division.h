// How places are divided among layers that miss differently, beyond the paper, where each has the
// same: by what a profile says that each misses with how many places. A layer whose selection stays
// misses hardly more with the fewest, one whose selection moves fast gains with each. Arithmetic
// alone.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"

namespace sluice {

// EssPoolShape::shares for pools whose mean is that of `even`: those with which the layers of a
// step of options.slots sequences of the profile's context nearest to max_context take the least
// time together, by their best schedules (schedule.h). No layer has less than the smallest ratio
// that was profiled. Empty where the profile has not two ratios of that context below 1, of so many
// layers, or the mean is not above the smallest.
std::vector<double> DividePlaces(const PolicyOptions& options, const EssPoolShape& even);

// The ratios below 1 that the profile has of its context nearest to max_context, with misses of so
// many layers; rising.
std::vector<double> ProfiledRatios(const MissProfile& profile, int64_t max_context, int layers);

// What a sequence of max_context misses in a step, by layer, with the shape's places, by the
// profile; empty where that does not say.
std::vector<double> ExpectedMisses(const PolicyOptions& options, const EssPoolShape& shape);

}  // namespace sluice
