#include "src/scheduler/planner.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

bool Decodes(const PlannerSequence& sequence) { return sequence.cached >= sequence.prompt_length; }

bool Rehearses(const PlannerSequence& sequence) {
  return sequence.rehearses && sequence.cached == sequence.prompt_length;
}

// Returns how many pending tokens of the kind that comes next a step may have; none if the sequence
// may not run.
int64_t Pending(const PlannerSequence& sequence, const PlannerLimits& limits) {
  if (!sequence.runnable) return 0;
  if (Decodes(sequence)) {
    const int64_t most = Rehearses(sequence) ? 1 : limits.decode_rows;
    return std::min<int64_t>(sequence.length - sequence.cached, most);
  }
  return std::min(sequence.length, sequence.prompt_length) - sequence.cached;
}

void AddRow(const PlannerSequence& sequence, int32_t count, StepPlan* plan) {
  const bool rehearsal = Rehearses(sequence);
  const bool sample =
      !rehearsal && sequence.wants_token && sequence.cached + count == sequence.length;
  const int64_t decoded =
      Decodes(sequence) ? sequence.cached - sequence.prompt_length + sequence.rehearsed : 0;
  plan->rows.push_back(
      {sequence.slot, sequence.cached, count, sample, static_cast<int32_t>(decoded), rehearsal});
  plan->row_count += count;
  plan->decode_rows += Decodes(sequence) ? count : 0;
  plan->sample_count += sample ? 1 : 0;
}

}  // namespace

void PlanStep(const PlannerLimits& limits, absl::Span<const PlannerSequence> sequences,
              StepPlan* plan) {
  SLUICE_CHECK(sequences.size() <= static_cast<size_t>(limits.max_rows));
  plan->rows.clear();
  plan->row_count = 0;
  plan->decode_rows = 0;
  plan->sample_count = 0;
  int32_t single = 0;
  for (const PlannerSequence& sequence : sequences)
    single += Pending(sequence, limits) == 1 ? 1 : 0;
  // Both kinds share the rest of the step in the order of the sequences, so each walk counts all of
  // it.
  for (const bool decode : {true, false}) {
    int32_t left = std::min(limits.chunk_tokens, limits.max_rows - single);
    for (const PlannerSequence& sequence : sequences) {
      const int64_t pending = Pending(sequence, limits);
      const auto count = static_cast<int32_t>(pending == 1 ? 1 : std::min<int64_t>(pending, left));
      if (count <= 0) continue;
      if (pending > 1) left -= count;
      if (Decodes(sequence) == decode) AddRow(sequence, count, plan);
    }
  }
}

}  // namespace sluice
