// Digests of blocks at Fluxion's four levels, and the scores of blocks by them, for any path (`S`:
// see simd_math.h).
#pragma once

#include "kernels/cpu/simd_scores.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int64_t kUnitTokens = LevelTokens(0);
inline constexpr int64_t kChunkUnits = kFluxionLargestBlock / kUnitTokens;

// Holds the digests of a chunk's blocks of one level: [means, variances] for each, as floats.
struct ChunkDigests {
  alignas(64) float of[kChunkUnits][2 * kMaxHeadDim];
};

// Makes kVectors columns of the digest of a unit, whose keys are given. Sums are those of the keys'
// differences from the first one, and so an element whose mean is far above its deviation loses
// nothing. Of 16 numbers none lies further from the mean than sqrt(15) deviations: the mean square
// of the differences is at most 16 times the variance, and no more than 4 bits cancel.
template <class S, int kVectors, typename T>
inline void DigestColumns(const T* const* keys, int64_t column, int64_t dim, float* digest) {
  using F = typename S::F;
  constexpr float kShare = 1.0f / kUnitTokens;
  F first[kVectors], sums[kVectors], squares[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    first[v] = LoadElements<S>(keys[0] + column + v * S::kWidth);
    sums[v] = squares[v] = S::Set1(0.0f);
  }
  for (int64_t t = 1; t < kUnitTokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F off = S::Sub(LoadElements<S>(keys[t] + column + v * S::kWidth), first[v]);
      sums[v] = S::Add(sums[v], off);
      squares[v] = S::Fma(off, off, squares[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const F off = S::Mul(sums[v], S::Set1(kShare));
    const F variance = S::Mul(S::Sub(squares[v], S::Mul(off, sums[v])), S::Set1(kShare));
    S::Store(digest + column + v * S::kWidth, S::Add(first[v], off));
    S::Store(digest + dim + column + v * S::kWidth, S::Max(variance, S::Set1(0.0f)));
  }
}

// Makes the digest of the 16 tokens from `begin` on. They may lie in several blocks of the cache.
template <class S, typename T>
void DigestUnit(const PagedCache& c, int64_t slot, int64_t head, int64_t begin, float* digest) {
  const int64_t dim = c.head_dim;
  const T* keys[kUnitTokens];
  for (int64_t t = 0; t < kUnitTokens; ++t) {
    keys[t] = static_cast<const T*>(c.base) + KeyIndex(c, slot, begin + t, head);
  }
  int64_t d = 0;
  for (; d + 4 * S::kWidth <= dim; d += 4 * S::kWidth) DigestColumns<S, 4>(keys, d, dim, digest);
  for (; d < dim; d += S::kWidth) DigestColumns<S, 1>(keys, d, dim, digest);
}

// Makes the digest of two neighbouring blocks. `out` may be `a`.
template <class S>
void JoinDigests(const float* a, const float* b, int64_t dim, float* out) {
  using F = typename S::F;
  const F half = S::Set1(0.5f);
  for (int64_t d = 0; d < dim; d += S::kWidth) {
    const F of_a = S::Load(a + d), of_b = S::Load(b + d);
    const F within = S::Mul(half, S::Add(S::Load(a + dim + d), S::Load(b + dim + d)));
    const F off = S::Mul(half, S::Sub(of_a, of_b));
    S::Store(out + d, S::Mul(half, S::Add(of_a, of_b)));
    S::Store(out + dim + d, S::Fma(off, off, within));
  }
}

// Keys are read once, for the smallest blocks; the others are joined from these, level by level. A
// row that has a complete chunk has a whole sink, so none of the smallest blocks straddles its end.
template <class S>
void DigestChunk(const LevelDigestsParams& p, int64_t row, int64_t chunk, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t slot = p.slots[row], dim = c.head_dim;
  int64_t first = Max(SegmentsOf(p.positions[row]).sink / kUnitTokens - chunk * kChunkUnits, 0);
  ChunkDigests digests;
  for (int64_t i = first; i < kChunkUnits; ++i) {
    const int64_t begin = (chunk * kChunkUnits + i) * kUnitTokens;
    if (c.type == DType::kFloat32) {
      DigestUnit<S, float>(c, slot, head, begin, digests.of[i]);
    } else {
      DigestUnit<S, uint16_t>(c, slot, head, begin, digests.of[i]);
    }
  }
  for (int level = 0; level < kFluxionLevels; ++level) {
    const int64_t count = kChunkUnits >> level;
    const PagedRows& rows = p.digests.of[level];
    for (int64_t i = first; i < count; ++i) {
      char* const out =
          static_cast<char*>(rows.base) + RowOffset(rows, slot, chunk * count + i, head);
      WriteRounded(out, rows.type, 0, digests.of[i], 2 * dim);
    }
    // A block whose first half is in the sink is its other half.
    for (int64_t i = first / 2; i < count / 2; ++i) {
      JoinDigests<S>(digests.of[Max(2 * i, first)], digests.of[2 * i + 1], dim, digests.of[i]);
    }
    first /= 2;
  }
}

// The (row, chunk, head) triples are taken in order, cut into equal shares, as in Digest().
template <class S>
void LevelDigests(const LevelDigestsParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim || p.digests.of[0].type != c.type) {
    KernelCheckFailed(
        "level_digests: head_dim a multiple of 16 up to 256, digests of the cache's type");
  }
  const auto first_chunk = [&](int64_t r) {
    const int32_t first = p.first_positions != nullptr ? p.first_positions[r] : p.positions[r];
    return int64_t{first / kFluxionLargestBlock};
  };
  const auto items = [&](int64_t r) {
    if (p.slots[r] < 0) return int64_t{0};
    return Max((p.positions[r] + int64_t{1}) / kFluxionLargestBlock - first_chunk(r), 0) *
           c.kv_heads;
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) total += items(r);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t r = 0; r < p.rows && before < mine.end; ++r) {
    const int64_t count = items(r);
    for (int64_t i = Max(mine.begin - before, 0); i < Min(mine.end - before, count); ++i) {
      DigestChunk<S>(p, r, first_chunk(r) + i / c.kv_heads, i % c.kv_heads);
    }
    before += count;
  }
}

// The query heads of one list that have scores, up to kScoreHeads at a time: for each the query,
// which a digest's means are multiplied with, then its squares, for the variances.
struct LevelQueries {
  int64_t count = 0;          // heads taken
  int64_t item[kScoreHeads];  // row * heads + h
  alignas(64) float of[kScoreHeads * kMaxRowDim];

  // Takes heads from h on, of those before `end` in the row, and returns the first not looked at.
  int64_t Take(const LevelScoresParams& p, int64_t row, int64_t h, int64_t end, int64_t all,
               int64_t dim) {
    count = 0;
    for (; h < end && count < kScoreHeads; ++h) {
      const int32_t selected = p.blocks[row * p.heads + h];
      if (selected <= 0 || selected >= all) continue;
      const float* q = p.q + row * p.q_stride + h * dim;
      float* const out = of + count * 2 * dim;
      for (int64_t d = 0; d < dim; ++d) {
        out[d] = q[d];
        out[dim + d] = q[d] * q[d];
      }
      item[count++] = row * p.heads + h;
    }
    return h;
  }
};

// Writes the scores of a head's `count` blocks from the dot products of their means and variances,
// which are changed.
template <class S>
void PutScores(float* means, const float* variances, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += S::kWidth) {
    const typename S::F variance = S::Max(S::Load(variances + i), S::Set1(0.0f));
    S::Store(means + i, S::Fma(S::Set1(kFluxionDeviations), S::Sqrt(variance), S::Load(means + i)));
  }
  for (int64_t i = 0; i < count; ++i) out[i] = means[i];
}

// Writes the scores of blocks [begin, end) of a list for the heads taken.
template <class S>
void ScoreBlocks(const LevelScoresParams& p, const PagedRows& digests, int64_t slot,
                 int64_t kv_head, const LevelQueries& queries, int64_t begin, int64_t end) {
  const int64_t dim = digests.dim / 2, bytes = digests.dim * SizeOf(digests.type);
  const auto row_at = [&](int64_t block) {
    return static_cast<const char*>(digests.base) + RowOffset(digests, slot, block, kv_head);
  };
  UnitScores means = {}, variances = {};
  for (int64_t first = begin; first < end; first += kScoreUnits) {
    const int64_t count = Min(kScoreUnits, end - first);
    for (int64_t i = 0; i < count; ++i) {
      // Rows of a head lie apart, and are too short for the processor's own prefetcher.
      constexpr int64_t kAhead = 4;
      if (first + i + kAhead < end) {
        const char* const ahead = row_at(first + i + kAhead);
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(ahead + b);
      }
      const char* const row = row_at(first + i);
      DotRow<S>(queries.of, queries.count, digests.dim, row, digests.type, dim, &means.scores[0][i],
                kScoreUnits);
      DotRow<S>(queries.of + dim, queries.count, digests.dim, row + bytes / 2, digests.type, dim,
                &variances.scores[0][i], kScoreUnits);
    }
    for (int64_t h = 0; h < queries.count; ++h) {
      PutScores<S>(means.scores[h], variances.scores[h], count,
                   p.scores + queries.item[h] * p.score_stride + first);
    }
  }
}

// The blocks of all lists that have scores are taken in order, cut into equal shares.
template <class S>
void LevelScores(const LevelScoresParams& p, Worker worker) {
  const int64_t dim = p.digests.of[0].dim / 2, kv_heads = p.digests.of[0].kv_heads;
  const int64_t group = p.heads / kv_heads, lists = p.rows * kv_heads;
  if (dim % 16 != 0 || dim > kMaxHeadDim) {
    KernelCheckFailed("level_scores: head_dim a multiple of 16 up to 256");
  }
  const auto blocks_of = [&](int64_t list) {
    const int64_t r = list / kv_heads;
    if (p.slots[r] < 0 || p.levels[list] < 0) return int64_t{0};
    const int64_t all = CpuBlocks(SegmentsOf(p.positions[r]), p.levels[list]);
    for (int64_t i = list * group; i < (list + 1) * group; ++i) {
      if (p.blocks[i] > 0 && p.blocks[i] < all) return all;
    }
    return int64_t{0};
  };
  int64_t total = 0;
  for (int64_t list = 0; list < lists; ++list) total += blocks_of(list);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t list = 0; list < lists && before < mine.end; ++list) {
    const int64_t count = blocks_of(list);
    const int64_t begin = Max(mine.begin - before, 0), end = Min(mine.end - before, count);
    before += count;
    if (begin >= end) continue;
    const int64_t r = list / kv_heads, kv_head = list % kv_heads, last = (kv_head + 1) * group;
    const int32_t level = p.levels[list];
    const int64_t first = FirstBlock(SegmentsOf(p.positions[r]), level);
    LevelQueries queries;
    for (int64_t h = kv_head * group; h < last;) {
      h = queries.Take(p, r, h, last, count, dim);
      ScoreBlocks<S>(p, p.digests.of[level], p.slots[r], kv_head, queries, first + begin,
                     first + end);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
