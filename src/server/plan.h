// The capacity planner behind --print-plan: what fits into the configured memory. Reads config.json
// and no weights.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/kv/cache_layout.h"
#include "src/model/model_config.h"

namespace sluice {

struct PlanInput {
  ModelConfig model;
  CacheLayout layout;
  int64_t hbm_bytes = 0;
  int64_t dram_bytes = 0;
  int64_t max_context = 0;
  int64_t max_sequences = 0;
  int64_t max_rows = 0;  // of a step
};

// Sequences of `context` tokens that an arena of `bytes` holds at once.
int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, int64_t context);
// Tokens of one sequence that it holds.
int64_t TokensThatFit(const CacheLayout& layout, int64_t bytes);

// A readable table, a few dozen lines.
std::string FormatPlan(const PlanInput& input);

// FormatPlan for a configuration; errors are those of LoadModelConfig and the settings'.
absl::StatusOr<std::string> PrintPlan(const Config& config);

}  // namespace sluice
