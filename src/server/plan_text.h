// Parts of a plan's text that the planner itself needs. FormatPlan is in src/server/plan.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/kv/cache_layout.h"

namespace sluice {

// Returns the contexts that a plan has lines for: 512, 2048, ... and `max_context`.
std::vector<int64_t> PlannedContexts(int64_t max_context);

// Returns the bytes of a sequence with so many tokens of each kind: "latent 1.50 GiB, index 300.0
// MiB".
std::string BytesByKind(const CacheLayout& layout, const TokensByKind& tokens);

}  // namespace sluice
