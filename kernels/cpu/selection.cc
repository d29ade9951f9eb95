// TopK for every path: exact, and linear in the units of a row. Scores become integers of the same
// order. Three histograms of their digits find the score of the k-th, and a last walk takes the
// units above it, and the first of those equal to it.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;

// Returns a key that rises with the score; NaN is -inf, and -0 is 0. There are no branches, because
// signs are as good as random.
uint32_t KeyOf(float score) {
  constexpr uint32_t kLowest = ~0xFF800000u;  // key of -inf
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  const uint32_t key = bits ^ (negative | 0x80000000u);
  const uint32_t is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u ? ~0u : 0u;
  return (key & ~is_nan) | (kLowest & is_nan);
}

// The units that may be chosen by score: [begin, end), without those that are forced.
struct Candidates {
  const float* scores;
  int64_t begin;
  int64_t end;
  uint32_t least;  // smallest key that may be chosen
};

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

// Calls body(unit, key) for every candidate in order. Keys are made some at a time, in vectors.
template <class Body>
void ForEachKey(const Candidates& c, Body body) {
  constexpr int64_t kAtOnce = 256;
  for (int64_t first = c.begin; first < c.end; first += kAtOnce) {
    uint32_t keys[kAtOnce];
    const int64_t count = Min(kAtOnce, c.end - first);
    for (int64_t i = 0; i < count; ++i) keys[i] = KeyOf(c.scores[first + i]);
    for (int64_t i = 0; i < count; ++i) body(first + i, keys[i]);
  }
}

// A cut takes keys above `key`, and the first `equal` candidates that have it.
struct Cut {
  uint32_t key;
  int64_t equal;

  // REQUIRES: calls come in the order of candidates.
  bool Takes(uint32_t of) { return of > key || (of == key && equal-- > 0); }
};

// Returns the cut that leaves `wanted` >= 1 candidates, or all where there are fewer.
Cut CutOf(const Candidates& c, int64_t wanted) {
  uint32_t prefix = 0;
  for (int shift = 32 - kDigitBits, known = 0;;) {
    uint32_t histogram[kDigits] = {};
    const int width = shift >= 0 ? kDigitBits : kDigitBits + shift;
    const int low = shift >= 0 ? shift : 0;
    const uint32_t mask = (1u << width) - 1;
    if (known == 0) {
      ForEachKey(c, [&](int64_t, uint32_t key) { histogram[key >> low] += key >= c.least; });
    } else {
      ForEachKey(c, [&](int64_t, uint32_t key) {
        if (key >> (32 - known) == prefix) histogram[key >> low & mask] += key >= c.least;
      });
    }
    int64_t digit = mask;
    for (; digit >= 0 && histogram[digit] < wanted; --digit) wanted -= histogram[digit];
    if (digit < 0) return {c.least, c.end};  // there are fewer than wanted
    prefix = prefix << width | static_cast<uint32_t>(digit);
    known += width;
    if (low == 0) return {prefix, wanted};
    shift -= kDigitBits;
  }
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
