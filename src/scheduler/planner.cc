#include "src/scheduler/planner.h"

#include <algorithm>
#include <utility>

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

// Adds rows for `count` pending tokens and for `drafts` drafts behind them.
void AddRow(const PlannerSequence& sequence, int32_t count, int32_t drafts, StepPlan* plan) {
  const bool rehearsal = Rehearses(sequence);
  const bool sample =
      !rehearsal && sequence.wants_token && sequence.cached + count == sequence.length;
  const int64_t decoded =
      Decodes(sequence) ? sequence.cached - sequence.prompt_length + sequence.rehearsed : 0;
  const int32_t all = count + drafts;
  plan->rows.push_back({sequence.slot, sequence.cached, all, sample, static_cast<int32_t>(decoded),
                        rehearsal, drafts});
  plan->row_count += all;
  plan->decode_rows += Decodes(sequence) ? all : 0;
  plan->sample_count += sample ? 1 + drafts : 0;
}

// Returns how many of its drafts a sequence may bring along, where `left` rows are left.
int32_t Drafts(const PlannerSequence& sequence, const PlannerLimits& limits, int32_t left) {
  if (sequence.drafts == 0 || !sequence.runnable) return 0;
  SLUICE_CHECK(Decodes(sequence) && sequence.wants_token && !Rehearses(sequence) &&
               sequence.cached + 1 == sequence.length);
  return std::min({sequence.drafts, limits.decode_rows - 1, left});
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
  const int32_t shared = limits.max_rows - single;
  int32_t drafts_left = shared;
  for (const PlannerSequence& sequence : sequences)
    drafts_left -= Drafts(sequence, limits, drafts_left);
  const int32_t undrafted = std::exchange(drafts_left, shared);
  // Both kinds share the rest of the step in the order of the sequences, so each walk counts all of
  // it.
  for (const bool decode : {true, false}) {
    int32_t left = std::min(limits.chunk_tokens, undrafted);
    for (const PlannerSequence& sequence : sequences) {
      const int64_t pending = Pending(sequence, limits);
      const auto count = static_cast<int32_t>(pending == 1 ? 1 : std::min<int64_t>(pending, left));
      if (count <= 0) continue;
      if (pending > 1) left -= count;
      if (Decodes(sequence) != decode) continue;
      const int32_t drafts = Drafts(sequence, limits, drafts_left);
      drafts_left -= drafts;
      AddRow(sequence, count, drafts, plan);
    }
  }
}

}  // namespace sluice
