// Tells a policy about the model that it serves.
#pragma once

#include "src/attention/policy_options.h"
#include "src/model/model.h"

namespace sluice {

// Sets the options that describe the model: max_context, heads, rows of a step, latent caches.
void DescribeModel(const Model& model, PolicyOptions* options);

}  // namespace sluice
