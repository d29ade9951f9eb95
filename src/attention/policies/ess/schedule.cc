#include "src/attention/policies/ess/schedule.h"

#include <algorithm>
#include <cmath>

namespace sluice {

double AddedTime(Overlap overlap, const StageTimes& t) {
  // The stages that follow the indexer's scores where nothing overlaps and nothing is fetched.
  const double none = t.beside + t.prepare + t.attend;
  // Attention begins with the transfer of the last rows, which waits for the queries.
  const double begin = std::max(t.prepare, t.beside);
  switch (overlap) {
    case Overlap::kNone:
      return t.transfer;
    case Overlap::kDa:
      return begin + std::max(t.attend + t.spared, t.transfer) + t.branch - none;
    case Overlap::kDba:
      break;
  }
  // The first half's transfer has the link to itself during the second half's indexer; then the
  // second half's transfer, of the same size, has it. Attention leaves processors to both.
  const double left = std::max(t.transfer / 2 - t.index / 2, 0.0) + t.transfer / 2;
  return std::max(begin + t.attend + 2 * t.spared,
                  std::max(begin + t.transfer / 2, t.beside + left)) +
         2 * t.branch + t.halves - none;
}

Overlap ChooseOverlap(const StageTimes& times, int rows) {
  Overlap best = Overlap::kNone;
  for (const Overlap other : {Overlap::kDa, Overlap::kDba}) {
    if (other == Overlap::kDba && rows < 2) continue;
    if (AddedTime(other, times) < AddedTime(best, times)) best = other;
  }
  return best;
}

StageRates AssumedRates(int64_t entry_bytes, int64_t index_key_bytes) {
  // Measured on an H200 (kernels/cuda/README.md): rows of 656 bytes at 44.5 GB/s, and 8.9 us for a
  // gather of 64 of them; SparseMla over 2,048 entries 31 us for one row and 225 for 128; index
  // logits of 32 x 128K keys 146 us and top-k 33 above them, 20 us together where there is little
  // to read; UpdateResidency 7 us, 19 where 76 rows miss some; q_b and its heads' product 18 and 31
  // us for 1 and 76 rows, beside which a traced step puts some 10 us. Assumed: a fork and a join
  // cost as much as one mailbox operation in a graph.
  StageRates rates;
  rates.transfer = {8, static_cast<double>(entry_bytes) / 44.5e3};
  rates.prepare = {28, 0.14};
  rates.attend = {30, 195.0 / (127 * 2048)};
  rates.index = {20, static_cast<double>(index_key_bytes) / 3.5e6};
  rates.update_residency = {7, 0.16};
  rates.branch_us = 2.9;
  return rates;
}

StageTimes TimesOf(const StageRates& rates, const LayerLoad& load, int rows) {
  StageTimes t;
  const double fetched = load.misses * rows;
  // Where less than one miss is expected, most steps fetch nothing.
  t.transfer = rates.transfer.fixed_us * std::min(1.0, fetched) + rates.transfer.each_us * fetched;
  t.prepare = rates.prepare.At(rows);
  t.attend = rates.attend.At(rows * load.selected);
  t.index = rates.index.At(rows * load.context);
  t.branch = rates.branch_us;
  t.halves = rates.index.fixed_us + rates.update_residency.fixed_us;
  t.spared = rates.spared_share * t.attend;
  // Top-k takes the indexer's time where there is little to read, and a fifth of the time it reads.
  t.beside = 0.2 * t.index + 0.8 * rates.index.fixed_us + rates.update_residency.At(rows);
  return t;
}

double FetchSeconds(const CoAttentionCosts& c, int64_t misses) {
  return static_cast<double>(misses * c.entry_bytes) / c.link_bytes_per_s;
}

double CoAttentionSeconds(const CoAttentionCosts& c, int64_t misses) {
  const double down = c.heads * (c.rank + c.rope) * 2.0 / c.link_bytes_per_s;  // Queries in bf16.
  const double up =
      static_cast<double>(c.heads * (c.rank * c.result_bytes + 4)) / c.link_bytes_per_s;
  const double flops = 2.0 * c.heads * (c.rank + c.rope + c.rank) * static_cast<double>(misses);
  return std::max({down, up, flops / c.cpu_flops});
}

int64_t CoAttentionBreakEven(const CoAttentionCosts& c) {
  // Both times grow in proportion to the misses; only the queries and results on the link do not.
  const double per_miss = 2.0 * c.heads * (c.rank + c.rope + c.rank) / c.cpu_flops;
  const double fetched = static_cast<double>(c.entry_bytes) / c.link_bytes_per_s;
  if (c.cpu_flops <= 0 || per_miss >= fetched) return -1;
  auto misses = static_cast<int64_t>(CoAttentionSeconds(c, 0) / fetched) - 1;
  misses = std::max<int64_t>(misses, 0);
  while (CoAttentionSeconds(c, misses) >= FetchSeconds(c, misses)) ++misses;
  return misses;
}

}  // namespace sluice
