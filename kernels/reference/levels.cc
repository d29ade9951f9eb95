// Digests of blocks at Fluxion's four levels, and the scores of blocks by them.
#include <algorithm>

#include "kernels/e4m3.h"
#include "kernels/reference/block_score.h"
#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// Writes the digest of block `block` of a level of (slot, head).
void WriteDigest(const LevelDigestsParams& p, int64_t sink, int32_t level, int64_t slot,
                 int64_t head, int64_t block) {
  const PagedCache& c = p.cache;
  const PagedRows& digests = p.digests.of[level];
  const int64_t dim = c.head_dim, tokens = LevelTokens(level) / kDigestPieces;
  auto* const row = static_cast<uint8_t*>(digests.base) + RowOffset(digests, slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    const auto key = [&](int64_t t) { return Get(c.base, c.type, KeyIndex(c, slot, t, head) + d); };
    const double centre =
        p.centres == nullptr ? 0 : double{p.centres[(slot * c.kv_heads + head) * dim + d]};
    double spread = 0;
    for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
      int64_t begin = block * LevelTokens(level) + piece * tokens;
      if (begin < sink) begin += 2 * tokens;
      double mean = 0;
      for (int64_t t = begin; t < begin + tokens; ++t) mean += key(t) / static_cast<double>(tokens);
      for (int64_t t = begin; t < begin + tokens; ++t) {
        spread += (key(t) - mean) * (key(t) - mean) / static_cast<double>(kDigestPieces * tokens);
      }
      row[piece * dim + d] = FloatToE4M3(static_cast<float>(mean - centre));
    }
    if (!HasSpread(digests, c.head_dim)) continue;
    row[kDigestPieces * dim + d] = FloatToE4M3(static_cast<float>(spread));
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
  const int64_t dim = p.head_dim;
  const float* const q = p.q + list.row * p.q_stride;
  for (int64_t h = list.kv_head * list.group; h < (list.kv_head + 1) * list.group; ++h) {
    if (!list.Wants(p, h)) continue;
    p.scores[(list.row * p.heads + h) * p.score_stride + block] =
        BlockScore(q + h * dim, p.digests, p.head_dim, SegmentsOf(p.positions[list.row]),
                   list.level, p.slots[list.row], block, list.kv_head);
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
        if (p.digests.of[level].base == nullptr) continue;
        const int64_t tokens = LevelTokens(level);
        for (int64_t b = (end - kFluxionLargestBlock) / tokens; b < end / tokens; ++b) {
          if (sink >= (b + 1) * tokens) continue;
          for (int64_t h = 0; h < p.cache.kv_heads; ++h) {
            WriteDigest(p, sink, level, p.slots[r], h, b);
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
