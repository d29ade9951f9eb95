// Random traffic through a policy: a sequence's bits are its own.
#pragma once

#include <functional>
#include <memory>

#include "src/attention/attention_policy.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice::testing {

// Whatever comes and goes, in whichever slot and row, with padded rows between, recorded or not,
// and with any number of threads: every sequence gives to the bit what it gives alone, and what it
// took is given back. `make_policy(rig, alone)` is called for the traffic and for each sequence
// alone, which has one thread and no recorded programs.
void CheckTraffic(
    const PolicyRig::Shape& shape, const PolicyRig::Make& make,
    const std::function<std::unique_ptr<AttentionPolicy>(const PolicyRig&, bool)>& make_policy);

}  // namespace sluice::testing
