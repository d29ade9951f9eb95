// What a request gives when it is alone: the same node, with room for it and nobody else, on a
// device without faults, and a caller and a sender that do everything at once. What a sparse policy
// attends to is its own affair; that it is the same in any company is everyone's.
#pragma once

#include "tests/sim/scenario.h"

namespace sluice::sim {

// REQUIRES: request.prompt, context, first, sampling, meeting and max_new_tokens are drawn.
Expected ExpectAlone(const NodeSpec& node, const RequestSpec& request);

// Tokens of the longest sequence that the node takes: by its policy, pools and max_context.
int64_t LongestSequence(const NodeSpec& node);

}  // namespace sluice::sim
