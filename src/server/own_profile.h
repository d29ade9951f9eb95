// The profile that a node makes of its own traffic where it was given none. Under policy ess the
// node watches what its first sequences select, and writes what pools of other sizes would miss
// (src/attention/policies/ess/selection_sampler.h) to a file for the model. Its next start divides
// places and prefetches by that file. What runs is not changed: a sequence's bits must not depend
// on the moment.
#pragma once

#include <string>

#include "src/attention/policy_options.h"
#include "src/config/setting.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Returns the file of the model with this fingerprint; empty if the node keeps none: another
// policy, a profile that was given, several ranks, which would each write it, a folder `none`, or
// `auto` without a home directory.
std::string OwnProfilePath(const Config& config, const std::string& fingerprint);

// Fills in what `options` take from that file, or has the policy make one if there is none. A file
// that cannot be used is logged and made anew.
void UseOwnProfile(const Config& config, const std::string& fingerprint, const CacheLayout& layout,
                   PolicyOptions* options);

}  // namespace sluice
