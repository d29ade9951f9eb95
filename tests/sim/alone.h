// The result of a request that is alone: on the same node, with capacity for it and no other
// request, on a device without faults, and with a caller and a sender that do everything at once. A
// sparse policy may choose what a row attends to, but the result must be the same in any company.
#pragma once

#include "tests/sim/scenario.h"

namespace sluice::sim {

// Returns what the request must give. REQUIRES: request.prompt, context, first, sampling, meeting
// and max_new_tokens are drawn.
Expected ExpectAlone(const NodeSpec& node, const RequestSpec& request);

// Fills in what a node says of itself: NodeSpec::longest, by its policy, pools and max_context, and
// the limits of its policy. `longest` is 0 if the node does not start.
void Measure(NodeSpec* node);

}  // namespace sluice::sim
