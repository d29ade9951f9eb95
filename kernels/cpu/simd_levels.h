// Digests of blocks at Fluxion's four levels, for any path (`S`: see simd_math.h).
#pragma once

#include "kernels/cpu/simd_scores.h"
#include "kernels/e4m3.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int64_t kUnitTokens = LevelTokens(0);
inline constexpr int64_t kChunkUnits = kFluxionLargestBlock / kUnitTokens;

inline constexpr int64_t kDigestPieceTokens = kUnitTokens / kDigestPieces;
inline constexpr int64_t kChunkPieces = kFluxionLargestBlock / kDigestPieceTokens;

// The pieces of a chunk, and the spreads of its blocks of level 0, as floats.
struct ChunkPieces {
  alignas(64) float of[kChunkPieces][kMaxHeadDim];
  alignas(64) float spreads[kChunkUnits][kMaxHeadDim];
};

// Makes the pieces of a unit, the means of each four of the tokens from `begin` on less the centre,
// which may be null, and its spread if that is not null.
template <class S, typename T>
void MakePieces(const PagedCache& c, int64_t slot, int64_t head, int64_t begin, const float* centre,
                float (*pieces)[kMaxHeadDim], float* spread) {
  using F = typename S::F;
  const T* keys[kUnitTokens];
  for (int64_t t = 0; t < kUnitTokens; ++t) {
    keys[t] = static_cast<const T*>(c.base) + KeyIndex(c, slot, begin + t, head);
  }
  const F share = S::Set1(1.0f / kDigestPieceTokens);
  for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
    const F of_all = centre != nullptr ? S::Load(centre + d) : S::Set1(0.0f);
    F squares = S::Set1(0.0f);
    for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
      const T* const* const of_piece = keys + piece * kDigestPieceTokens;
      F sum = LoadElements<S>(of_piece[0] + d);
      for (int64_t t = 1; t < kDigestPieceTokens; ++t) {
        sum = S::Add(sum, LoadElements<S>(of_piece[t] + d));
      }
      const F mean = S::Mul(sum, share);
      for (int64_t t = 0; spread != nullptr && t < kDigestPieceTokens; ++t) {
        const F off = S::Sub(LoadElements<S>(of_piece[t] + d), mean);
        squares = S::Fma(off, off, squares);
      }
      S::Store(pieces[piece] + d, S::Sub(mean, of_all));
    }
    if (spread != nullptr) S::Store(spread + d, S::Mul(squares, S::Set1(1.0f / kUnitTokens)));
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
    for (int64_t j = 0; j < rows.dim / dim; ++j) {
      int64_t piece = i * kDigestPieces + j;
      if (piece < first) piece += kDigestPieces / 2;
      const float* const from = j == kDigestPieces ? pieces.spreads[i] : pieces.of[piece];
      for (int64_t d = 0; d < dim; ++d) out[j * dim + d] = FloatToE4M3(from[d]);
    }
  }
}

// Keys are read once, for the smallest blocks; other pieces are joined from theirs, level by level.
// A row that has a complete chunk has a whole sink, so none of the smallest blocks straddles its
// end.
template <class S>
void DigestChunk(const LevelDigestsParams& p, int64_t row, int64_t chunk, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t slot = p.slots[row], dim = c.head_dim;
  const float* const centre =
      p.centres == nullptr ? nullptr : p.centres + (slot * c.kv_heads + head) * dim;
  const int64_t sink = SegmentsOf(p.positions[row]).sink;
  int64_t first = Max(sink / kDigestPieceTokens - chunk * kChunkPieces, 0);
  const bool has_spread = HasSpread(p.digests.of[0], c.head_dim);
  ChunkPieces pieces;
  for (int64_t i = first / kDigestPieces; i < kChunkUnits; ++i) {
    const int64_t begin = (chunk * kChunkUnits + i) * kUnitTokens;
    float(*const of_unit)[kMaxHeadDim] = pieces.of + i * kDigestPieces;
    float* const spread = has_spread ? pieces.spreads[i] : nullptr;
    if (c.type == DType::kFloat32) {
      MakePieces<S, float>(c, slot, head, begin, centre, of_unit, spread);
    } else {
      MakePieces<S, uint16_t>(c, slot, head, begin, centre, of_unit, spread);
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
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim || !AreDigests(p.digests, c.head_dim)) {
    KernelCheckFailed(
        "level_digests: head_dim a multiple of 16 up to 256, digests of it in e4m3, a spread at "
        "level 0 alone");
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

}  // namespace
}  // namespace sluice::kernels::cpu
