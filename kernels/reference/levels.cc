// Digests of blocks at Fluxion's four levels, and the bounds of blocks by them.
#include <algorithm>
#include <limits>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Writes the digest of tokens [begin, end) of (slot, head) as row `block`.
void WriteDigest(const PagedCache& c, const PagedRows& digests, int64_t slot, int64_t head,
                 int64_t block, int64_t begin, int64_t end) {
  const int64_t dim = c.head_dim;
  char* const row = static_cast<char*>(digests.base) + RowOffset(digests, slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    double least = kInfinity, largest = -kInfinity;
    for (int64_t t = begin; t < end; ++t) {
      const double key = Get(c.base, c.type, KeyIndex(c, slot, t, head) + d);
      // A comparison with NaN is false: NaNs do not count.
      if (key < least) least = key;
      if (key > largest) largest = key;
    }
    Put(row, digests.type, d, least);
    Put(row, digests.type, dim + d, largest);
  }
}

// Returns a head's bound of q k over the block whose digest is given.
double Bound(const float* q, const void* digest, DType type, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    sum += std::max(double{q[d]} * Get(digest, type, dim + d), double{q[d]} * Get(digest, type, d));
  }
  return sum;
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
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / p.heads, h = item % p.heads, slot = p.slots[r];
    if (slot < 0) continue;
    const int64_t kv_heads = p.digests.of[0].kv_heads, kv_head = h / (p.heads / kv_heads);
    const int32_t level = p.levels[r * kv_heads + kv_head];
    if (level < 0) continue;
    const FluxionSegments segments = SegmentsOf(p.positions[r]);
    const int32_t selected = p.blocks[item];
    if (selected <= 0 || selected >= CpuBlocks(segments, level)) continue;
    const PagedRows& digests = p.digests.of[level];
    const int64_t dim = digests.dim / 2;
    for (int64_t b = FirstBlock(segments, level); b < EndBlock(segments, level); ++b) {
      const char* digest =
          static_cast<const char*>(digests.base) + RowOffset(digests, slot, b, kv_head);
      p.scores[item * p.score_stride + b] =
          static_cast<float>(Bound(p.q + r * p.q_stride + h * dim, digest, digests.type, dim));
    }
  }
}

}  // namespace sluice::kernels::reference
