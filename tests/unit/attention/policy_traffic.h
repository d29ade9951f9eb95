// Random traffic through a policy: a sequence's bits are its own.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "src/attention/attention_policy.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice::testing {

// Results of a sequence, step by step, one vector of all layers each.
using Decoded = std::vector<std::vector<float>>;
// Adds a row of PolicyRig::Step's result.
void Add(Decoded& decoded, const std::vector<std::vector<std::vector<float>>>& out, size_t row);

// Whatever comes and goes, in whichever slot and row, with padded rows between, recorded or not,
// and with any number of threads: every sequence gives to the bit what it gives alone, and what it
// took is given back. `make_policy(rig, alone)` is called for the traffic and for each sequence
// alone, which has one thread and no recorded programs.
void CheckTraffic(
    const PolicyRig::Shape& shape, const PolicyRig::Make& make,
    const std::function<std::unique_ptr<AttentionPolicy>(const PolicyRig&, bool)>& make_policy);

}  // namespace sluice::testing
