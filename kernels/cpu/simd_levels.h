// Digests of blocks at Fluxion's four levels, and the scores of blocks by them, for any path (`S`:
// see simd_math.h).
#pragma once

#include "kernels/cpu/simd_scores.h"
#include "kernels/e4m3.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int64_t kUnitTokens = LevelTokens(0);
inline constexpr int64_t kChunkUnits = kFluxionLargestBlock / kUnitTokens;

inline constexpr int64_t kDigestPieceTokens = kUnitTokens / kDigestPieces;
inline constexpr int64_t kChunkPieces = kFluxionLargestBlock / kDigestPieceTokens;

// The pieces of a chunk, as floats.
struct ChunkPieces {
  alignas(64) float of[kChunkPieces][kMaxHeadDim];
};

// Makes a piece of level 0, the mean of the tokens from `begin` on less the centre, which may be
// null.
template <class S, typename T>
void MakePiece(const PagedCache& c, int64_t slot, int64_t head, int64_t begin, const float* centre,
               float* piece) {
  const T* keys[kDigestPieceTokens];
  for (int64_t t = 0; t < kDigestPieceTokens; ++t) {
    keys[t] = static_cast<const T*>(c.base) + KeyIndex(c, slot, begin + t, head);
  }
  constexpr float kShare = 1.0f / kDigestPieceTokens;
  for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
    typename S::F sum = LoadElements<S>(keys[0] + d);
    for (int64_t t = 1; t < kDigestPieceTokens; ++t)
      sum = S::Add(sum, LoadElements<S>(keys[t] + d));
    const typename S::F of_all = centre != nullptr ? S::Load(centre + d) : S::Set1(0.0f);
    S::Store(piece + d, S::Sub(S::Mul(sum, S::Set1(kShare)), of_all));
  }
}

// Makes the piece of two neighbouring ones. `out` may be `a`.
template <class S>
void JoinPieces(const float* a, const float* b, int64_t dim, float* out) {
  const typename S::F half = S::Set1(0.5f);
  for (int64_t d = 0; d < dim; d += S::kWidth) {
    S::Store(out + d, S::Mul(half, S::Add(S::Load(a + d), S::Load(b + d))));
  }
}

// Writes the digests of a level's blocks. The pieces before `first` are in the sink.
inline void PutDigests(const PagedRows& rows, int64_t slot, int64_t head, int64_t chunk,
                       int32_t level, const ChunkPieces& pieces, int64_t first, int64_t dim) {
  const int64_t count = kChunkUnits >> level;
  for (int64_t i = first / kDigestPieces; i < count; ++i) {
    auto* const out =
        static_cast<uint8_t*>(rows.base) + RowOffset(rows, slot, chunk * count + i, head);
    for (int64_t j = 0; j < kDigestPieces; ++j) {
      int64_t piece = i * kDigestPieces + j;
      if (piece < first) piece += kDigestPieces / 2;
      for (int64_t d = 0; d < dim; ++d) out[j * dim + d] = FloatToE4M3(pieces.of[piece][d]);
    }
  }
}

// Keys are read once, for the smallest pieces; the others are joined from these, level by level. A
// row that has a complete chunk has a whole sink, so none of the smallest blocks straddles its end.
template <class S>
void DigestChunk(const LevelDigestsParams& p, int64_t row, int64_t chunk, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t slot = p.slots[row], dim = c.head_dim;
  const float* const centre =
      p.centres == nullptr ? nullptr : p.centres + (slot * c.kv_heads + head) * dim;
  const int64_t sink = SegmentsOf(p.positions[row]).sink;
  int64_t first = Max(sink / kDigestPieceTokens - chunk * kChunkPieces, 0);
  ChunkPieces pieces;
  for (int64_t i = first; i < kChunkPieces; ++i) {
    const int64_t begin = (chunk * kChunkPieces + i) * kDigestPieceTokens;
    if (c.type == DType::kFloat32) {
      MakePiece<S, float>(c, slot, head, begin, centre, pieces.of[i]);
    } else {
      MakePiece<S, uint16_t>(c, slot, head, begin, centre, pieces.of[i]);
    }
  }
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    if (p.digests.of[level].base != nullptr) {
      PutDigests(p.digests.of[level], slot, head, chunk, level, pieces, first, dim);
    }
    first /= 2;
    for (int64_t i = first; i < kChunkPieces >> (level + 1); ++i) {
      JoinPieces<S>(pieces.of[2 * i], pieces.of[2 * i + 1], dim, pieces.of[i]);
    }
  }
}

// The (row, chunk, head) triples are taken in order, cut into equal shares, as in Digest().
template <class S>
void LevelDigests(const LevelDigestsParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim ||
      p.digests.of[0].type != DType::kFloat8E4M3) {
    KernelCheckFailed("level_digests: head_dim a multiple of 16 up to 256, digests in e4m3");
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

// The query heads of one list that have scores, up to kScoreHeads at a time.
struct LevelQueries {
  int64_t count = 0;          // heads taken
  int64_t item[kScoreHeads];  // row * heads + h
  alignas(64) float of[kScoreHeads * kMaxHeadDim];

  // Takes heads from h on, of those before `end` in the row, and returns the first not looked at.
  int64_t Take(const LevelScoresParams& p, int64_t row, int64_t h, int64_t end, int64_t all,
               int64_t dim) {
    count = 0;
    for (; h < end && count < kScoreHeads; ++h) {
      const int32_t selected = p.blocks[row * p.heads + h];
      if (selected <= 0 || selected >= all) continue;
      __builtin_memcpy(of + count * dim, p.q + row * p.q_stride + h * dim,
                       sizeof(float) * static_cast<size_t>(dim));
      item[count++] = row * p.heads + h;
    }
    return h;
  }
};

// Raises best[h] to the scores of the pieces in one row of digests.
template <class S>
void ScorePieces(const LevelQueries& queries, const uint8_t* row, int64_t dim, float* best) {
  float scores[kScoreHeads];
  for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
    DotRow<S>(queries.of, queries.count, dim, row + piece * dim, dim, scores, 1);
    for (int64_t h = 0; h < queries.count; ++h) {
      best[h] = scores[h] > best[h] ? scores[h] : best[h];
    }
  }
}

// Writes the scores of blocks [begin, end) of a list for the heads taken.
template <class S>
void ScoreBlocks(const LevelScoresParams& p, const FluxionSegments& segments, int32_t level,
                 int64_t slot, int64_t kv_head, const LevelQueries& queries, int64_t begin,
                 int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const DigestRows rows = RowsOfBlock(p.digests, segments, level, static_cast<int32_t>(block));
    const PagedRows& digests = p.digests.of[rows.level];
    const auto row_at = [&](int64_t b) {
      return static_cast<const uint8_t*>(digests.base) + RowOffset(digests, slot, b, kv_head);
    };
    float best[kScoreHeads];
    for (float& score : best) score = kNegativeInfinity;
    const int64_t behind = int64_t{EndBlock(segments, rows.level)};
    for (int64_t b = rows.begin; b < rows.end; ++b) {
      // Rows of a head lie apart, and are too short for the processor's own prefetcher.
      constexpr int64_t kAhead = 4;
      if (b + kAhead < behind) {
        const uint8_t* const ahead = row_at(b + kAhead);
        for (int64_t i = 0; i < digests.dim; i += 64) __builtin_prefetch(ahead + i);
      }
      ScorePieces<S>(queries, row_at(b), digests.dim / kDigestPieces, best);
    }
    for (int64_t h = 0; h < queries.count; ++h) {
      p.scores[queries.item[h] * p.score_stride + block] = best[h];
    }
  }
}

// The blocks of all lists that have scores are taken in order, cut into equal shares.
template <class S>
void LevelScores(const LevelScoresParams& p, Worker worker) {
  const int64_t dim = p.digests.of[0].dim / kDigestPieces;
  const int64_t kv_heads = p.digests.of[0].kv_heads;
  const int64_t group = p.heads / kv_heads, lists = p.rows * kv_heads;
  if (dim % 16 != 0 || dim > kMaxHeadDim || p.digests.of[0].type != DType::kFloat8E4M3) {
    KernelCheckFailed("level_scores: head_dim a multiple of 16 up to 256, digests in e4m3");
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
    const FluxionSegments segments = SegmentsOf(p.positions[r]);
    const int64_t first = FirstBlock(segments, level);
    LevelQueries queries;
    for (int64_t h = kv_head * group; h < last;) {
      h = queries.Take(p, r, h, last, count, dim);
      ScoreBlocks<S>(p, segments, level, p.slots[r], kv_head, queries, first + begin, first + end);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
