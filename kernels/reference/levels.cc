// Digests of blocks at Fluxion's four levels, and the scores of blocks by them.
#include <algorithm>

#include "kernels/reference/block_score.h"
#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// Writes the digest of tokens [begin, end) of (slot, head) as row `block`.
void WriteDigest(const PagedCache& c, const PagedRows& digests, int64_t slot, int64_t head,
                 int64_t block, int64_t begin, int64_t end) {
  const int64_t dim = c.head_dim;
  const auto tokens = static_cast<double>(end - begin);
  char* const row = static_cast<char*>(digests.base) + RowOffset(digests, slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    const auto key = [&](int64_t t) { return Get(c.base, c.type, KeyIndex(c, slot, t, head) + d); };
    double mean = 0, variance = 0;
    for (int64_t t = begin; t < end; ++t) mean += key(t) / tokens;
    for (int64_t t = begin; t < end; ++t) variance += (key(t) - mean) * (key(t) - mean) / tokens;
    Put(row, digests.type, d, mean);
    Put(row, digests.type, dim + d, variance);
  }
}

// A list of LevelScores, of whose blocks `scored` have scores: all or none.
struct ScoredList {
  ScoredList(const LevelScoresParams& p, int64_t list)
      : row(list / p.digests.of[0].kv_heads),
        kv_head(list % p.digests.of[0].kv_heads),
        group(p.heads / p.digests.of[0].kv_heads),
        level(p.levels[list]) {
    if (p.slots[row] < 0 || level < 0) return;
    const FluxionSegments segments = SegmentsOf(p.positions[row]);
    first = FirstBlock(segments, level);
    all = CpuBlocks(segments, level);
    for (int64_t h = 0; h < group; ++h) {
      if (Wants(p, kv_head * group + h)) scored = all;
    }
  }
  bool Wants(const LevelScoresParams& p, int64_t head) const {
    const int32_t selected = p.blocks[row * p.heads + head];
    return selected > 0 && selected < all;
  }

  int64_t row, kv_head, group;
  int32_t level;
  int64_t first = 0, all = 0, scored = 0;
};

// Writes the scores of one block for the heads that want some.
void ScoreBlock(const LevelScoresParams& p, const ScoredList& list, int64_t block) {
  const PagedRows& digests = p.digests.of[list.level];
  const float* const q = p.q + list.row * p.q_stride;
  for (int64_t h = list.kv_head * list.group; h < (list.kv_head + 1) * list.group; ++h) {
    if (!list.Wants(p, h)) continue;
    p.scores[(list.row * p.heads + h) * p.score_stride + block] =
        BlockScore(q + h * (digests.dim / 2), digests, p.slots[list.row], block, list.kv_head);
  }
}

}  // namespace

void LevelDigests(const LevelDigestsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const int64_t last = p.positions[r], sink = SegmentsOf(p.positions[r]).sink;
    const int64_t first = p.first_positions != nullptr ? p.first_positions[r] : last;
    for (int64_t end = kFluxionLargestBlock; end <= last + 1; end += kFluxionLargestBlock) {
      if (end - 1 < first) continue;
      for (int32_t level = 0; level < kFluxionLevels; ++level) {
        const int64_t tokens = LevelTokens(level);
        for (int64_t b = (end - kFluxionLargestBlock) / tokens; b < end / tokens; ++b) {
          const int64_t begin = std::max(b * tokens, sink);
          if (begin >= (b + 1) * tokens) continue;
          for (int64_t h = 0; h < p.cache.kv_heads; ++h) {
            WriteDigest(p.cache, p.digests.of[level], p.slots[r], h, b, begin, (b + 1) * tokens);
          }
        }
      }
    }
  }
}

void LevelScores(const LevelScoresParams& p, Worker worker) {
  const int64_t lists = int64_t{p.rows} * p.digests.of[0].kv_heads;
  int64_t total = 0;
  for (int64_t list = 0; list < lists; ++list) total += ScoredList(p, list).scored;
  const Range mine = Share(total, worker);
  int64_t number = 0;
  for (int64_t list = 0; list < lists; ++list) {
    const ScoredList of(p, list);
    for (int64_t i = 0; i < of.scored; ++i, ++number) {
      if (number >= mine.begin && number < mine.end) ScoreBlock(p, of, of.first + i);
    }
  }
}

}  // namespace sluice::kernels::reference
