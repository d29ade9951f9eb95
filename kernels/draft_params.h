// This file declares the contracts of the operators of speculation on the device: a draft layer
// makes its drafts behind the sampling of a step, without a word from the host. The conventions of
// params.h hold.
#pragma once

#include <cstdint>

#include "kernels/sparse_params.h"

namespace sluice::kernels {

// The rows that chose a token are in `slots` and `positions`. Neighbouring rows of one slot are one
// sequence, of positions that rise by one: the row after row r then verifies a draft, the token
// that the history has behind row r. Rows are accepted from the first one of a sequence up to the
// one whose choice is not the draft behind it, or that is its last.
//
// The choice of the last accepted row is written to the history behind it, unless it is -1. So the
// history is right up to there, and what it has behind that is made of drafts that were refuted.
//
// For each row, what drafting goes on from: the slot of the last accepted row of each sequence, if
// its choice is not -1 and the history has room for `drafts` further tokens, and -1 in the other
// rows.
inline constexpr int32_t kMaxDeviceDrafts = 3;
struct SettleDraftsParams {
  const int32_t* slots;      // [rows]; -1: padded
  const int32_t* positions;  // [rows]
  const int32_t* chosen;     // [rows] tokens; -1: the logits were not finite
  const int32_t* step_rows;  // [rows] rows of the step that they are
  int32_t* tokens;           // [slots][token_stride]
  int64_t token_stride;
  int32_t* draft_slots;  // [rows]
  int32_t* draft_rows;   // [rows] step_rows[r], or -1 where draft_slots[r] is -1
  // [drafts + 1][rows] positions[r] + d: that from which draft number d is made. The draft is the
  // token two behind it.
  int32_t* draft_positions;
  // [drafts][rows] Where drafts will be; all are set to kNoDraft.
  int32_t* out_drafts;
  int32_t rows;
  int32_t drafts;  // <= kMaxDeviceDrafts
};
// There is no draft. (-1 says that a draft's logits were not finite.)
inline constexpr int32_t kNoDraft = -2;

// Lists the newest positions of each row's sequence, up to its own one:
//   [max(begins[slot], position + 1 - lists.capacity), position]
// in ascending order. A padded row has none.
struct NewestListsParams {
  const int32_t* slots;      // [rows]; -1: padded
  const int32_t* positions;  // [rows]
  const int32_t* begins;     // [slots] the first position that has an entry
  UnitLists lists;           // [rows]
  int32_t rows;
};

}  // namespace sluice::kernels
