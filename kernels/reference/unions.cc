// SelectUnion of the reference.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "kernels/fluxion_segments.h"
#include "kernels/reference/reference.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

// Adds the blocks that query head `head` of the row selects to `chosen`.
void SelectBlocks(const SelectUnionParams& p, int64_t r, int64_t head, int32_t level,
                  std::set<int32_t>* chosen) {
  const FluxionSegments segments = SegmentsOf(p.positions[r]);
  const int32_t all = CpuBlocks(segments, level), wanted = p.blocks[r * p.heads + head];
  std::vector<std::pair<float, int32_t>> ranked;  // {-score, block}
  for (int32_t b = FirstBlock(segments, level); b < EndBlock(segments, level); ++b) {
    // Nobody has written the scores of a head that selects all.
    const float given = wanted >= all ? 0 : p.scores[(r * p.heads + head) * p.score_stride + b];
    ranked.emplace_back(std::isnan(given) ? -kNegativeInfinity : -given, b);
  }
  std::sort(ranked.begin(), ranked.end());
  for (int32_t i = 0; i < std::min(wanted, all); ++i) {
    chosen->insert(ranked[static_cast<size_t>(i)].second);
  }
}

// Returns the units of the union of what the heads of (row, KV head) select.
std::vector<int32_t> UnionOf(const SelectUnionParams& p, int64_t r, int64_t kv_head) {
  const int32_t level = p.levels[r * p.kv_heads + kv_head];
  if (level < 0) return {};
  if (level >= kFluxionLevels || LevelTokens(level) % p.unit_tokens != 0) {
    KernelCheckFailed("select_union: a block is a whole number of units");
  }
  const int64_t group = p.heads / p.kv_heads;
  std::set<int32_t> chosen;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    SelectBlocks(p, r, h, level, &chosen);
  }
  const int32_t units = LevelTokens(level) / p.unit_tokens;  // of a block
  const int32_t sink = SegmentsOf(p.positions[r]).sink;
  std::vector<int32_t> result;
  for (const int32_t block : chosen) {
    for (int32_t unit = block * units; unit < (block + 1) * units; ++unit) {
      if (unit * p.unit_tokens >= sink) result.push_back(unit);
    }
  }
  return result;
}

}  // namespace

void SelectUnion(const SelectUnionParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    int64_t selected = 0;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const int64_t list = r * p.kv_heads + h;
      p.selected.counts[list] = 0;
      if (p.slots[r] < 0) continue;
      const std::vector<int32_t> units = UnionOf(p, r, h);
      if (std::ssize(units) > p.selected.capacity) KernelCheckFailed("select_union: no room");
      std::copy(units.begin(), units.end(), p.selected.units + list * p.selected.capacity);
      p.selected.counts[list] = static_cast<int32_t>(units.size());
      selected += std::ssize(units);
    }
    if (p.slots[r] < 0 || p.counters == nullptr) continue;
    p.counters[p.slots[r]].steps += 1;
    p.counters[p.slots[r]].selected += selected * p.unit_tokens;
  }
}

}  // namespace sluice::kernels::reference
