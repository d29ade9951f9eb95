// Random traffic through a policy, to check that a sequence's bits do not depend on its company.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "src/attention/attention_policy.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice::testing {

// Results of a sequence, step by step: one vector per step with all layers.
using Decoded = std::vector<std::vector<float>>;
// Adds a row of PolicyRig::Step's result.
void Add(Decoded& decoded, const std::vector<std::vector<std::vector<float>>>& out, size_t row);

// Checks that every sequence gives, to the bit, what it gives alone, and that everything it took is
// given back, whichever sequences come and go, in whichever slot and row, with padded rows between,
// recorded or not, and with any number of threads. `make_policy(rig, alone)` is called for the
// traffic and for each sequence alone, which has one thread and no recorded programs.
void CheckTraffic(
    const PolicyRig::Shape& shape, const PolicyRig::Make& make,
    const std::function<std::unique_ptr<AttentionPolicy>(const PolicyRig&, bool)>& make_policy);

}  // namespace sluice::testing
