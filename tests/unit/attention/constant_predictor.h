// A predictor of policy fluxion whose answer is always the same.
#pragma once

#include <memory>
#include <vector>

#include "src/attention/policies/fluxion/predictor.h"

namespace sluice::testing {

// Returns a predictor that answers every head with these budgets at the four levels, or with
// streaming.
std::shared_ptr<const FluxionPredictor> ConstantPredictor(const std::vector<float>& budgets,
                                                          bool streaming);

}  // namespace sluice::testing
