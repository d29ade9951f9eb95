// Parts of a plan's text that the planner itself needs. FormatPlan is in src/server/plan.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/kv/cache_layout.h"
#include "src/model/model_config.h"

namespace sluice {

// Returns the contexts that a plan has lines for: 512, 2048, ... and `max_context`.
std::vector<int64_t> PlannedContexts(int64_t max_context);

// Returns the bytes of a sequence with so many tokens of each kind: "latent 1.50 GiB, index 300.0
// MiB".
std::string BytesByKind(const CacheLayout& layout, const TokensByKind& tokens);

// Returns lines about the part of a model that a rank has, and what a step of `rows` decode rows
// exchanges. INVALID_ARGUMENT, UNIMPLEMENTED: the model cannot be divided so.
absl::StatusOr<std::string> RankText(const ModelConfig& config, int rank, int ranks, int64_t rows);

}  // namespace sluice
