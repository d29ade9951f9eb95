// The planner: which rows the next step computes. It is pure: a plan is a function of what is
// passed in, reads no token values, and is the same on every device.
//
// A row is of one of two kinds: a decode row is a token past its sequence's prompt, a prompt row is
// one of the prompt. Kernel sets may compute the two in different ways (kernels/params.h), so the
// kind depends only on the row's position: neither on how a prompt was cut into chunks nor on how
// much of it was handed over.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// A sequence of the running batch as the planner sees it.
struct PlannerSequence {
  int32_t slot = 0;
  // Tokens [0, prompt_length) are the prompt.
  int64_t prompt_length = 0;
  // Tokens [cached, length) have no KV yet: they are pending.
  int64_t cached = 0;
  int64_t length = 0;
  // True: the row of the last pending token chooses a new one. False: all tokens were chosen that
  // may be.
  bool wants_token = true;
  // False if its working set is not warm, its reader is slow, or it has nothing left to compute.
  bool runnable = true;
  // Rehearsals of its first decode row that were planned before (AttentionPolicy::rehearsals).
  int32_t rehearsed = 0;
  // True: its first decode row, if that comes next, is rehearsed. The row is planned alone, chooses
  // no token, and its token stays pending.
  bool rehearses = false;
  // Drafts of the tokens that follow `length`, which its one pending decode row brings along as
  // rows to be verified (src/engine/drafter.h). REQUIRES: 0 unless it decodes, has one pending
  // token and wants one.
  int32_t drafts = 0;
};

// Tokens [first_position, first_position + count) of one sequence, all of one kind.
struct PlanRow {
  int32_t slot = 0;
  int64_t first_position = 0;
  int32_t count = 0;
  bool sample = false;  // the last of the tokens chooses the next one
  // The decode rows that the sequence had before the first of these; 0 for rows of a prompt.
  int32_t decoded = 0;
  bool rehearsal = false;  // the token stays pending
  // The last of the tokens, up to here, are drafts. They and the token before them each choose one.
  int32_t drafts = 0;
};

struct StepPlan {
  std::vector<PlanRow> rows;  // decode rows come first
  int32_t row_count = 0;      // sum of counts
  int32_t decode_rows = 0;    // number of decode rows among them
  int32_t sample_count = 0;   // tokens that choose one
};

struct PlannerLimits {
  int32_t max_rows = 0;             // maximum rows of a step, all sequences
  int32_t chunk_tokens = 0;         // maximum rows of pending prompts in a step
  int32_t decode_rows = INT32_MAX;  // maximum decode rows of one sequence in a step
};

// Plans a step. Every runnable sequence with one pending token gets its row; the rest of the step
// goes, up to chunk_tokens, to sequences with more, in the order given (first come, first served).
// Tokens pending past the prompt wait until the prompt has its rows: a step gives a sequence rows
// of one kind. Drafts come before rows of prompts, where max_rows and decode_rows leave room.
// `plan` is overwritten; its memory is used again. REQUIRES: sequences.size() <= max_rows.
void PlanStep(const PlannerLimits& limits, absl::Span<const PlannerSequence> sequences,
              StepPlan* plan);

}  // namespace sluice
