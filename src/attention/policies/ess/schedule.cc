#include "src/attention/policies/ess/schedule.h"

#include <algorithm>
#include <cmath>

namespace sluice {

double AddedTime(Overlap overlap, const StageTimes& t) {
  if (overlap == Overlap::kNone) return t.transfer;
  if (overlap == Overlap::kQueries) return t.transfer + t.branch;
  const double beneath = t.prepare + t.attend;
  if (overlap == Overlap::kDa) return std::max(0.0, t.transfer - beneath) + t.branch;
  // The second half's transfer begins after its indexer: the first half's, of the same size, has
  // the second's indexer to itself.
  const double left = std::max(t.transfer / 2 - t.index / 2, 0.0) + t.transfer / 2;
  return std::max(0.0, left - beneath) + 2 * t.branch + t.halves;
}

Overlap ChooseOverlap(const StageTimes& times) {
  Overlap best = Overlap::kNone;
  for (const Overlap other : {Overlap::kDa, Overlap::kDba}) {
    if (AddedTime(other, times) < AddedTime(best, times)) best = other;
  }
  return best;
}

StageTimes EstimateStages(const LayerMisses& layer, int rows, int64_t entry_bytes,
                          int64_t index_key_bytes) {
  // platform.md: rows of 656 bytes at 45 GB/s, and 8.9 us for a gather of 64 of them; FlashMLA's
  // sparse decode takes 18 us for one row and 173 for 128; q_b in fp8 15 us at any batch to 128,
  // absorption's two batched products read 33 MB; keys are read at 80 % of 4.2 TB/s, top-k adds a
  // quarter.
  StageTimes t;
  const double moved = layer.misses * rows * static_cast<double>(entry_bytes);
  t.transfer = layer.misses == 0 ? 0 : 8 + moved / 45e3;
  t.prepare = 15 + 33e6 / 3.4e6;
  t.attend = 18 + 1.22 * (rows - 1);
  t.index = 1.25 * (5 + static_cast<double>(rows) * static_cast<double>(layer.context) *
                            static_cast<double>(index_key_bytes) / 3.4e6);
  return t;
}

double FetchSeconds(const CoAttentionCosts& c, int64_t misses) {
  return static_cast<double>(misses * c.entry_bytes) / c.link_bytes_per_s;
}

double CoAttentionSeconds(const CoAttentionCosts& c, int64_t misses) {
  const double down = c.heads * (c.rank + c.rope) * 2.0 / c.link_bytes_per_s;  // bf16 queries
  const double up =
      static_cast<double>(c.heads * (c.rank * c.result_bytes + 4)) / c.link_bytes_per_s;
  const double flops = 2.0 * c.heads * (c.rank + c.rope + c.rank) * static_cast<double>(misses);
  return std::max({down, up, flops / c.cpu_flops});
}

int64_t CoAttentionBreakEven(const CoAttentionCosts& c) {
  // Both grow with the number of misses in proportion; only what is moved either way does not.
  const double per_miss = 2.0 * c.heads * (c.rank + c.rope + c.rank) / c.cpu_flops;
  const double fetched = static_cast<double>(c.entry_bytes) / c.link_bytes_per_s;
  if (c.cpu_flops <= 0 || per_miss >= fetched) return -1;
  auto misses = static_cast<int64_t>(CoAttentionSeconds(c, 0) / fetched) - 1;
  misses = std::max<int64_t>(misses, 0);
  while (CoAttentionSeconds(c, misses) >= FetchSeconds(c, misses)) ++misses;
  return misses;
}

}  // namespace sluice
