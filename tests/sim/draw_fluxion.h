// Draws nodes of policy fluxion and their requests. Units of this policy have 16 tokens or more,
// and a row reads outside HBM only behind some 450 tokens, so blocks are larger here, and requests
// are longer and fewer.
#pragma once

#include <cstdint>
#include <optional>

#include "tests/sim/scenario.h"

namespace sluice::sim {

// Limits of a seed: requests, and the tokens that each of them gives.
inline constexpr int64_t kMostFluxionRequests = 5;
inline constexpr int64_t kMostFluxionTokens = 40;

// Returns whether a node that was drawn with another sparse policy is to have fluxion in its place.
// The draw is separate, so that the other seeds stay the same.
bool IsFluxion(const NodeSpec& node);

// Makes a node of a sparse policy one of fluxion.
void DrawFluxion(NodeSpec* node);

// Returns the length of a prompt. REQUIRES: Measure(node) was called.
int64_t DrawFluxionPrompt(SplitMix64& random, const NodeSpec& node);

// Returns the hints that come with a request of `context` tokens, if any. REQUIRES: as above.
std::optional<SelectionHints> DrawFluxionHints(uint32_t context, const NodeSpec& node,
                                               SplitMix64& random);

}  // namespace sluice::sim
