#include "src/scheduler/planner.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

void AddRow(const PlannerSequence& sequence, int32_t count, StepPlan* plan) {
  const bool sample = sequence.wants_token && sequence.cached + count == sequence.length;
  plan->rows.push_back({sequence.slot, sequence.cached, count, sample});
  plan->row_count += count;
  plan->sample_count += sample ? 1 : 0;
}

}  // namespace

void PlanStep(const PlannerLimits& limits, absl::Span<const PlannerSequence> sequences,
              StepPlan* plan) {
  SLUICE_CHECK(sequences.size() <= static_cast<size_t>(limits.max_rows));
  plan->rows.clear();
  plan->row_count = 0;
  plan->sample_count = 0;
  for (const PlannerSequence& sequence : sequences) {
    if (sequence.runnable && sequence.length - sequence.cached == 1) AddRow(sequence, 1, plan);
  }
  int32_t left = std::min(limits.chunk_tokens, limits.max_rows - plan->row_count);
  for (const PlannerSequence& sequence : sequences) {
    const int64_t pending = sequence.length - sequence.cached;
    if (!sequence.runnable || pending <= 1 || left == 0) continue;
    const auto count = static_cast<int32_t>(std::min<int64_t>(pending, left));
    AddRow(sequence, count, plan);
    left -= count;
  }
}

}  // namespace sluice
