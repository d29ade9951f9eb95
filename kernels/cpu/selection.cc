// TopK for every path: exact, and linear in the units of a row. A walk takes the units above the
// score of the k-th, and the first of those equal to it.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/score_cut.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

uint32_t LeastKey(const float* scores, int64_t units, float margin) {
  if (margin == __builtin_inff()) return 0;
  constexpr int64_t kLanes = 16;  // so many that the next maximum need not wait for the last
  float lanes[kLanes];
  for (float& lane : lanes) lane = kNegativeInfinity;
  int64_t u = 0;
  for (; u + kLanes <= units; u += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float score = scores[u + i];
      lanes[i] = score > lanes[i] ? score : lanes[i];
    }
  }
  for (; u < units; ++u) lanes[0] = scores[u] > lanes[0] ? scores[u] : lanes[0];
  float largest = kNegativeInfinity;
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  return KeyOf(largest - margin);
}

// Lists the candidates that a selection with `capacity` more would have beside the `wanted` that
// were chosen.
void ListRunnersUp(const TopKParams& p, int64_t list, const Candidates& candidates,
                   int64_t wanted) {
  Cut chosen = CutOf(candidates, wanted);
  Cut more = CutOf(candidates, wanted + p.runners_up.capacity);
  int32_t* const units = p.runners_up.units + list * p.runners_up.capacity;
  int32_t count = 0;
  ForEachKey(candidates, [&](int64_t unit, uint32_t key) {
    const bool is_chosen = chosen.Takes(key);
    if (more.Takes(key) && !is_chosen) units[count++] = static_cast<int32_t>(unit);
  });
  p.runners_up.counts[list] = count;
}

}  // namespace

void TopKList(const TopKParams& p, int64_t list) {
  int32_t& count = p.selected.counts[list];
  count = 0;
  const bool asked = p.runners_up.units != nullptr;
  if (asked) p.runners_up.counts[list] = 0;
  const int64_t r = list / p.kv_heads;
  if (!IsWanted(p, list, r)) return;
  const int64_t units = p.positions[r] / p.unit_tokens + 1;
  const float* scores = p.scores + list * p.score_stride;
  int32_t* selected = p.selected.units + list * p.selected.capacity;
  const int64_t begin = Min(p.first_units, units);
  const int64_t end = Max(begin, units - p.last_units);
  const int64_t wanted = KOfRow(p, static_cast<int32_t>(units)) - begin - (units - end);
  const Candidates candidates = {scores, begin, end, LeastKey(scores, units, p.margin)};
  for (int64_t u = 0; u < begin; ++u) selected[count++] = static_cast<int32_t>(u);
  if (wanted > 0) {
    Cut cut = CutOf(candidates, wanted);
    ForEachKey(candidates, [&](int64_t unit, uint32_t key) {
      if (cut.Takes(key)) selected[count++] = static_cast<int32_t>(unit);
    });
    if (asked && p.runners_up.capacity > 0) ListRunnersUp(p, list, candidates, wanted);
  }
  for (int64_t u = end; u < units; ++u) selected[count++] = static_cast<int32_t>(u);
}

void TopK(const TopKParams& p, Worker worker) {
  if (p.first_units < 0 || p.last_units < 0 || p.k < p.first_units + p.last_units ||
      p.selected.capacity < Max(p.k, p.short_k)) {
    KernelCheckFailed("top_k: first_units + last_units <= k <= capacity, short_k <= capacity");
  }
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) TopKList(p, list);
}

}  // namespace sluice::kernels::cpu
