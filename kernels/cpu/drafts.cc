// The operators of speculation on the device, for every path on the CPU. They copy whole numbers
// about, so there is nothing for vectors to gain.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

// Returns the last accepted row of the sequence whose first row is `first`, and sets `end` to the
// row behind its last one.
int64_t LastAccepted(const SettleDraftsParams& p, int64_t first, int64_t* end) {
  const int32_t* const history = p.tokens + p.slots[first] * p.token_stride;
  int64_t last = first, row = first;
  bool accepted = true;
  for (; row + 1 < p.rows && p.slots[row + 1] == p.slots[first]; ++row) {
    accepted = accepted && p.chosen[row] == history[p.positions[row] + 1];
    if (accepted) last = row + 1;
  }
  *end = row + 1;
  return last;
}

void ClearRow(const SettleDraftsParams& p, int64_t row) {
  p.draft_slots[row] = p.draft_rows[row] = -1;
  for (int64_t d = 0; d < p.drafts; ++d) p.out_drafts[d * p.rows + row] = kNoDraft;
  for (int64_t d = 0; d <= p.drafts; ++d) {
    p.draft_positions[d * p.rows + row] =
        p.slots[row] < 0 ? 0 : p.positions[row] + static_cast<int32_t>(d);
  }
}

}  // namespace

// One worker settles all rows: there are few of them.
void SettleDrafts(const SettleDraftsParams& p, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t row = 0; row < p.rows; ++row) ClearRow(p, row);
  for (int64_t row = 0, end = 0; row < p.rows; row = end) {
    end = row + 1;
    if (p.slots[row] < 0) continue;
    const int64_t last = LastAccepted(p, row, &end);
    const int64_t next = p.positions[last] + 1;
    if (p.chosen[last] < 0 || next >= p.token_stride) continue;
    p.tokens[p.slots[last] * p.token_stride + next] = p.chosen[last];
    if (next + p.drafts >= p.token_stride) continue;
    p.draft_slots[last] = p.slots[last];
    p.draft_rows[last] = p.step_rows[last];
  }
}

void NewestLists(const NewestListsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int32_t slot = p.slots[row], position = p.positions[row];
    p.lists.counts[row] = 0;
    if (slot < 0) continue;
    const int64_t first = Max(p.begins[slot], position + int64_t{1} - p.lists.capacity);
    int32_t* const units = p.lists.units + row * p.lists.capacity;
    for (int64_t at = first; at <= position; ++at) units[at - first] = static_cast<int32_t>(at);
    p.lists.counts[row] = static_cast<int32_t>(Max(position + int64_t{1} - first, 0));
  }
}

}  // namespace sluice::kernels::cpu
