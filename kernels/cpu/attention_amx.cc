// Attention of the path "amx" over bf16 caches: both products on tiles, softmax in float32.
//
// The work on one split of at most kAttentionSplitTokens tokens, for up to three tiles of 16
// queries:
// - scores: S^T[token][query] = K Q^T. K is read as it lies in memory; Q^T is put in order once.
// - softmax: over the whole split at once, so there is no running maximum and nothing is rescaled.
// - values: O[query][dim] = P V. Pairs of rows of V are interleaved as tiles want them.
// A query enters as three bf16 parts, x = high + middle + low, which are all of its 24 bits; its
// weights P enter as two, which keep 16. A tile adds each product in float32, by rising k, in an
// order that does not depend on the other rows and columns, so a query has the same bits in any
// tile.
#include <immintrin.h>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/attention_ahead.h"
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/sparse_items.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kGroupPieces = 4;  // tiles of scores that are computed at a time
constexpr int64_t kStepDims = 32;    // elements of a tile's row
constexpr int64_t kStepTokens = 32;  // tokens of one step of P V
constexpr int64_t kTileFloats = kTileRows * 16;
constexpr int64_t kQueryParts = 3;
constexpr int64_t kValueElements = 8 << 10;  // elements of V interleaved at a time: they stay in L1

// The second half of a step may lie past the end.
using AheadOfWork = Ahead<kPieceTokens>;

// A row of scores, later of weights: for each step of 32 tokens 64 bytes of high parts, then 64 of
// low ones. The row is padded, so that the 16 rows of a tile do not meet in the same sets of the
// cache.
constexpr int64_t kScoreStride = kAttentionSplitTokens + 32;

struct AmxScratch : ItemScratch {
  // [query tile][step of 32 dims][part][16 pairs of dims][16 queries][2]
  alignas(64) uint16_t queries[kMaxQueries * kMaxHeadDim * kQueryParts];
  alignas(64) float scores[kMaxQueries * kScoreStride];
  alignas(64) float tiles[2][kGroupPieces][kTileFloats];
  // [step of 32 tokens][16 columns of O][16 pairs of tokens][16 columns][2]
  alignas(64) uint16_t values[2][kValueElements];
  alignas(64) uint16_t gathered[kGroupPieces][kPieceTokens * kMaxHeadDim];  // scattered keys
  float sums[kMaxQueries];
  AheadOfWork ahead;
};

// Configures tiles 0 to 5 with `rows` rows, 6 and 7 with 16.
void ConfigureTiles(int64_t rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = kTileBytes;
    config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : kTileRows);
  }
  Written(&config);
  _tile_loadconfig(&config);
}

// The high and the low parts of 32 elements.
inline void StoreParts(__m512 a, __m512 b, void* high, void* low) {
  const __m512 high_a = HighPart(a), high_b = HighPart(b);
  _mm512_store_si512(high, PackBf16(high_a, high_b));
  _mm512_store_si512(low, PackBf16(_mm512_sub_ps(a, high_a), _mm512_sub_ps(b, high_b)));
}

// Returns 2^x, and 0 for x below -126; the relative error is below 2e-7. REQUIRES: x <= 0 or -inf.
inline __m512 Exp2(__m512 x) {
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-1000.0f), x);  // NaN stays NaN
  const __m512 n = Avx512::Round(clamped);
  const __m512 r = _mm512_sub_ps(clamped, n);
  __m512 e = _mm512_set1_ps(1.3333558146e-3f);
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(9.6181291076e-3f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(5.5504108664e-2f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(2.4022650696e-1f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(6.9314718056e-1f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(e, n);
}

// Stores columns [0, columns) of a 16 x 16 tile to rows of `out`, `stride` floats apart.
inline void TransposeTile(const float* tile, int64_t columns, int64_t stride, float* out) {
  for (int64_t q = 0; q < columns; q += 4) {
    __m512 rows[4];
    // The 128-bit lane i of rows[m] has four columns of row 4 i + m.
    for (int m = 0; m < 4; ++m) {
      const float* from = tile + m * 16 + q;
      __m512 v = _mm512_castps128_ps512(_mm_load_ps(from));
      v = _mm512_insertf32x4(v, _mm_load_ps(from + 4 * 16), 1);
      v = _mm512_insertf32x4(v, _mm_load_ps(from + 8 * 16), 2);
      rows[m] = _mm512_insertf32x4(v, _mm_load_ps(from + 12 * 16), 3);
    }
    const __m512 low01 = _mm512_unpacklo_ps(rows[0], rows[1]);
    const __m512 high01 = _mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512 low23 = _mm512_unpacklo_ps(rows[2], rows[3]);
    const __m512 high23 = _mm512_unpackhi_ps(rows[2], rows[3]);
    const __m512 of_column[4] = {
        _mm512_shuffle_ps(low01, low23, 0x44), _mm512_shuffle_ps(low01, low23, 0xEE),
        _mm512_shuffle_ps(high01, high23, 0x44), _mm512_shuffle_ps(high01, high23, 0xEE)};
    const int64_t count = Min(4, columns - q);
    for (int64_t j = 0; j < count; ++j) _mm512_store_ps(out + (q + j) * stride, of_column[j]);
  }
}

// Adds K Q^T over 32 dims to one tile of scores.
#define SLUICE_SCORE_STEP(tile, keys) \
  _tile_loadd(6, keys, row_bytes);    \
  _tile_dpbf16ps(tile, 6, 4);         \
  _tile_dpbf16ps(tile, 6, 5);         \
  _tile_dpbf16ps(tile, 6, 7)

// Stores the scores of the turn-th (group of pieces, query tile) to their rows.
inline void TransposeGroup(AmxScratch& s, int64_t turn, int64_t query_tiles, int64_t queries,
                           int64_t lines) {
  const int64_t first = turn / query_tiles * kGroupPieces;
  const int64_t q = turn % query_tiles * kTileRows;
  for (int64_t i = 0; i < kGroupPieces; ++i) {
    TransposeTile(s.tiles[turn % 2][i], Min(kTileRows, queries - q), kScoreStride,
                  s.scores + q * kScoreStride + (first + i) * kPieceTokens);
    if (lines > 0) s.ahead.Issue(lines);
  }
}

// The share of the lines planned per KiB of keys that is issued beside its product; the rest is
// issued beside the transposition of its scores.
constexpr int64_t TileLines(int64_t lines) { return lines * 5 / 8; }

// Returns the keys of piece `piece` one behind the other: in place, or copied together.
inline const uint16_t* KeysOf(AmxScratch& s, int64_t piece, int64_t dim, bool scattered) {
  const uint16_t* const* at = s.ahead.piece(piece);
  if (!scattered) return *at;
  uint16_t* out = s.gathered[piece % kGroupPieces];
  for (int64_t t = 0; t < kPieceTokens; ++t) {
    for (int64_t d = 0; d < dim; d += kStepDims) {
      _mm512_store_si512(out + t * dim + d, _mm512_loadu_si512(at[t] + d));
    }
  }
  Written(out);
  return out;
}

// Computes scores of every query for the tokens of four pieces, of which `first` is the first and
// `count` exist; those of the last turn stay in s.tiles. `lines` of the next data are asked for per
// KiB of keys.
void ScoreGroup(AmxScratch& s, int64_t first, int64_t count, int64_t queries, int64_t dim,
                bool scattered, int64_t lines, int64_t& turn) {
  const int64_t steps = dim / kStepDims;
  const int64_t tile_lines = TileLines(lines);
  const int64_t row_bytes = dim * 2;
  const int64_t query_tiles = CeilDiv(queries, kTileRows);
  const uint16_t* pieces[kGroupPieces];
  for (int64_t i = 0; i < kGroupPieces; ++i) {
    // A piece that does not exist has scores that nobody reads.
    pieces[i] = i < count ? KeysOf(s, first + i, dim, scattered) : pieces[0];
  }
  if (lines > 0) s.ahead.SkipTo(first + kGroupPieces);
  for (int64_t q = 0; q < queries; q += kTileRows) {
    const uint16_t* of_tile = s.queries + q * dim * kQueryParts;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
      const uint16_t* parts = of_tile + step * 2 * kQueryParts * kTileFloats;
      _tile_loadd(4, parts, kTileBytes);
      _tile_loadd(5, parts + 2 * kTileFloats, kTileBytes);
      _tile_loadd(7, parts + 4 * kTileFloats, kTileBytes);
      const int64_t dims = step * kStepDims;
      SLUICE_SCORE_STEP(0, pieces[0] + dims);
      if (lines > 0) s.ahead.Issue(tile_lines);
      SLUICE_SCORE_STEP(1, pieces[1] + dims);
      if (lines > 0) s.ahead.Issue(tile_lines);
      SLUICE_SCORE_STEP(2, pieces[2] + dims);
      if (lines > 0) s.ahead.Issue(tile_lines);
      SLUICE_SCORE_STEP(3, pieces[3] + dims);
      if (lines > 0) s.ahead.Issue(tile_lines);
    }
    float(&tiles)[kGroupPieces][kTileFloats] = s.tiles[turn % 2];
    _tile_stored(0, tiles[0], kTileBytes);
    _tile_stored(1, tiles[1], kTileBytes);
    _tile_stored(2, tiles[2], kTileBytes);
    _tile_stored(3, tiles[3], kTileBytes);
    // Scores are stored one turn late: what was just stored by the tile is not there yet, and
    // waiting for it would leave memory idle.
    if (turn > 0) TransposeGroup(s, turn - 1, query_tiles, queries, steps * (lines - tile_lines));
    ++turn;
  }
}

// Turns the scores of one query to weights 2^(score - largest), in two parts, for `steps` steps of
// tokens of which the first `valid` count; leaves their sum and lse. `lines` of the next data are
// asked for per step.
void Softmax(AmxScratch& s, int64_t query, int64_t valid, int64_t steps, int64_t lines) {
  float* row = s.scores + query * kScoreStride;
  if (valid <= 0) {
    for (int64_t i = 0; i < steps * kStepTokens; i += 16) {
      _mm512_store_ps(row + i, _mm512_setzero_ps());
    }
    s.sums[query] = 0;
    s.lse[query] = kNegativeInfinity;
    return;
  }
  valid = Min(valid, steps * kStepTokens);
  const int64_t valid_steps = CeilDiv(valid, kStepTokens);
  for (int64_t t = valid; t < valid_steps * kStepTokens; ++t) row[t] = kNegativeInfinity;
  __m512 best0 = _mm512_set1_ps(kNegativeInfinity), best1 = best0;
  for (int64_t i = 0; i < valid_steps * kStepTokens; i += kStepTokens) {
    best0 = _mm512_max_ps(best0, _mm512_load_ps(row + i));
    best1 = _mm512_max_ps(best1, _mm512_load_ps(row + i + 16));
  }
  const float largest = Avx512::Largest(_mm512_max_ps(best0, best1));
  const __m512 offset = _mm512_set1_ps(largest);
  __m512 total0 = _mm512_setzero_ps(), total1 = total0;
  for (int64_t i = 0; i < valid_steps * kStepTokens; i += kStepTokens) {
    const __m512 w0 = Exp2(_mm512_sub_ps(_mm512_load_ps(row + i), offset));
    const __m512 w1 = Exp2(_mm512_sub_ps(_mm512_load_ps(row + i + 16), offset));
    total0 = _mm512_add_ps(total0, w0);
    total1 = _mm512_add_ps(total1, w1);
    StoreParts(w0, w1, row + i, row + i + 16);
    if (lines > 0) s.ahead.Issue(lines);
  }
  for (int64_t i = valid_steps * kStepTokens; i < steps * kStepTokens; i += 16) {
    _mm512_store_ps(row + i, _mm512_setzero_ps());
  }
  constexpr float kLn2 = 0.69314718055994531f;
  s.sums[query] = Avx512::Sum(_mm512_add_ps(total0, total1));
  s.lse[query] = largest * kLn2 + __builtin_logf(s.sums[query]);
}

// Interleaves pairs of rows of V of one step of 32 tokens, `valid` of them, as tiles of 16 columns.
// Interleaving within 128-bit lanes leaves the columns of two neighbouring tiles mixed: FinishOuts
// puts them right.
void InterleaveValues(AmxScratch& s, int64_t piece, int64_t valid, int64_t dim, bool scattered,
                      int64_t lines, uint16_t* out) {
  for (int64_t half = 0; half < 2; ++half) {
    const uint16_t* const* rows = s.ahead.piece(piece + half);
    if (lines > 0) s.ahead.SkipTo(piece + half + 1);
    for (int64_t pair = 0; pair < 8; ++pair) {
      const int64_t token = half * kPieceTokens + 2 * pair;
      const uint16_t* even = scattered ? rows[2 * pair] : *rows + 2 * pair * dim;
      const uint16_t* odd = scattered ? rows[2 * pair + 1] : even + dim;
      uint16_t* to = out + token * 16;  // row token / 2 of the first tile
      // Weights past the end are 0, but 0 x NaN would not be.
      const __mmask32 keep_even = token < valid ? ~__mmask32{0} : 0;
      const __mmask32 keep_odd = token + 1 < valid ? ~__mmask32{0} : 0;
      for (int64_t d = 0; d < dim; d += kStepDims) {
        const __m512i a = _mm512_maskz_loadu_epi16(keep_even, even + d);
        const __m512i b = _mm512_maskz_loadu_epi16(keep_odd, odd + d);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + 2 * kTileFloats, _mm512_unpackhi_epi16(a, b));
        to += 4 * kTileFloats;
      }
      if (lines > 0) s.ahead.Issue(lines);
    }
  }
}

// Adds the weights of one step to the columns of one tile of outs.
#define SLUICE_VALUE_STEP(tile, values_tile, values) \
  _tile_loadd(values_tile, values, kTileBytes);      \
  _tile_dpbf16ps(tile, 4, values_tile);              \
  _tile_dpbf16ps(tile, 5, values_tile)

// Adds P V of `steps` steps to kTiles x 16 columns of up to 16 queries; begins them where `fresh`.
template <int kTiles>
void ValueTiles(const float* weights, const uint16_t* values, int64_t steps, int64_t dim,
                bool fresh, int64_t lines, AheadOfWork& ahead, float* outs) {
  const int64_t row_bytes = dim * 4;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, outs, row_bytes);
    _tile_loadd(1, outs + 16, row_bytes);
    if constexpr (kTiles > 2) {
      _tile_loadd(2, outs + 32, row_bytes);
      _tile_loadd(3, outs + 48, row_bytes);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    const float* parts = weights + step * kStepTokens;
    const uint16_t* of_step = values + step * kStepTokens * dim;
    _tile_loadd(4, parts, kScoreStride * 4);
    _tile_loadd(5, parts + 16, kScoreStride * 4);
    SLUICE_VALUE_STEP(0, 6, of_step);
    if (lines > 0) ahead.Issue(lines);
    SLUICE_VALUE_STEP(1, 7, of_step + 2 * kTileFloats);
    if (lines > 0) ahead.Issue(lines);
    if constexpr (kTiles > 2) {
      SLUICE_VALUE_STEP(2, 6, of_step + 4 * kTileFloats);
      if (lines > 0) ahead.Issue(lines);
      SLUICE_VALUE_STEP(3, 7, of_step + 6 * kTileFloats);
      if (lines > 0) ahead.Issue(lines);
    }
  }
  _tile_stored(0, outs, row_bytes);
  _tile_stored(1, outs + 16, row_bytes);
  if constexpr (kTiles > 2) {
    _tile_stored(2, outs + 32, row_bytes);
    _tile_stored(3, outs + 48, row_bytes);
  }
}

// Puts columns back in order and divides them by the sum of the weights.
void FinishOuts(AmxScratch& s, int64_t query, int64_t dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512 sum = _mm512_set1_ps(s.sums[query]);
  float* outs = s.outs + query * dim;
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512 a = _mm512_load_ps(outs + d), b = _mm512_load_ps(outs + d + 16);
    _mm512_store_ps(outs + d, _mm512_div_ps(_mm512_permutex2var_ps(a, first, b), sum));
    _mm512_store_ps(outs + d + 16, _mm512_div_ps(_mm512_permutex2var_ps(a, second, b), sum));
  }
}

// The halves of s.values, used in turn.
inline uint16_t* ValuesOf(AmxScratch& s, int64_t step, int64_t range_steps) {
  return s.values[step / range_steps % 2];
}

void AttendPieces(const SplitPlace& place, int64_t queries, int64_t dim, AmxScratch& s) {
  const int64_t tokens = place.end - place.begin;
  const int64_t piece_count = CeilDiv(tokens, kPieceTokens);
  const int64_t steps = CeilDiv(tokens, kStepTokens);
  const int64_t rows = Min(kTileRows, queries);
  const bool scattered = place.Scattered();
  // Lines to plan for beside the work on one KiB of keys, and on one step of a query's softmax: in
  // proportion to their times. With many queries K and V are used long enough to come by
  // themselves.
  const bool few = queries <= kTileRows;
  const int64_t lines = few ? Max(4, 16 - queries * kStepDims / dim) : 0;
  const int64_t softmax_lines = few ? 4 : 0;
  const int64_t pair_lines = CeilDiv(lines * dim, 16 * kStepDims);
  if (few) {
    const int64_t key_lines =
        CeilDiv(piece_count, kGroupPieces) * kGroupPieces * (dim / kStepDims) * lines;
    const int64_t value_lines = 16 * pair_lines + dim / 16 * (lines / 2);
    s.ahead.Plan(key_lines + steps * (queries * softmax_lines + value_lines));
  }
  ConfigureTiles(kTileRows);
  int64_t turn = 0;
  for (int64_t i = 0; i < piece_count; i += kGroupPieces) {
    ScoreGroup(s, i, Min(kGroupPieces, piece_count - i), queries, dim, scattered, lines, turn);
  }
  TransposeGroup(s, turn - 1, CeilDiv(queries, kTileRows), queries,
                 dim / kStepDims * (lines - TileLines(lines)));
  const int64_t padded = CeilDiv(queries, rows) * rows;
  for (int64_t q = 0; q < padded; ++q) {
    const int64_t valid = q < queries ? s.last_token[q] + 1 - place.begin : 0;
    Softmax(s, q, valid, steps, softmax_lines);
  }
  Written(s.scores);
  if (rows < kTileRows) ConfigureTiles(rows);
  const int64_t range_steps = Max(1, kValueElements / (dim * kStepTokens) / (few ? 4 : 1));
  const auto interleave = [&](int64_t step) {
    for (int64_t i = step; i < Min(step + range_steps, steps); ++i) {
      InterleaveValues(s, piece_count + i * (kStepTokens / kPieceTokens), tokens - i * kStepTokens,
                       dim, scattered, pair_lines,
                       ValuesOf(s, step, range_steps) + (i - step) * kStepTokens * dim);
    }
  };
  interleave(0);
  for (int64_t step = 0; step < steps; step += range_steps) {
    // Values are interleaved one range early, for the same reason.
    interleave(step + range_steps);
    Written(s.values);
    const int64_t count = Min(range_steps, steps - step);
    const uint16_t* values = ValuesOf(s, step, range_steps);
    for (int64_t q = 0; q < queries; q += rows) {
      const float* weights = s.scores + q * kScoreStride + step * kStepTokens;
      float* outs = s.outs + q * dim;
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64) {
        ValueTiles<4>(weights, values + d * 32, count, dim, step == 0, lines / 2, s.ahead,
                      outs + d);
      }
      if (d < dim)
        ValueTiles<2>(weights, values + d * 32, count, dim, step == 0, lines / 2, s.ahead,
                      outs + d);
    }
  }
  _tile_release();
}

struct AmxAttention {
  using Vectors = Avx512;
  using Scratch = AmxScratch;

  static constexpr int64_t CostPerToken(int64_t queries) { return CeilDiv(queries, kTileRows) + 2; }

  // The scale includes log2(e): softmax is in powers of 2.
  static void LoadQueries(const AttentionParams& p, const AttentionUnit& unit, AmxScratch& s) {
    const int64_t dim = p.cache.head_dim;
    const int64_t queries = unit.tile.rows * unit.heads;
    const __m512 scale = _mm512_set1_ps(p.scale * 1.44269504088896341f);
    for (int64_t first = 0; first < queries; first += kTileRows) {
      for (int64_t d = 0; d < dim; d += kStepDims) {
        for (int64_t r = 0; r < kTileRows; ++r) {
          __m512 x0 = _mm512_setzero_ps(), x1 = x0;
          if (first + r < queries) {
            const int64_t q = first + r;
            const float* from = p.q + (unit.tile.row + q / unit.heads) * p.q_stride +
                                (unit.first_head + q % unit.heads) * dim + d;
            x0 = _mm512_mul_ps(_mm512_loadu_ps(from), scale);
            x1 = _mm512_mul_ps(_mm512_loadu_ps(from + 16), scale);
          }
          for (int64_t part = 0; part < kQueryParts; ++part) {
            const __m512 high0 = HighPart(x0), high1 = HighPart(x1);
            _mm512_store_si512(s.tiles[0][part] + r * 16, PackBf16(high0, high1));
            x0 = _mm512_sub_ps(x0, high0);
            x1 = _mm512_sub_ps(x1, high1);
          }
        }
        uint16_t* parts =
            s.queries + first * dim * kQueryParts + d / kStepDims * 2 * kQueryParts * kTileFloats;
        for (int64_t part = 0; part < kQueryParts; ++part) {
          TransposeTile(s.tiles[0][part], kTileRows, 16,
                        reinterpret_cast<float*>(parts + part * 2 * kTileFloats));
        }
      }
    }
    Written(s.queries);
  }

  static void AttendSplit(const PagedCache& c, const SplitPlace& place, const SplitPlace& next,
                          int64_t queries, AmxScratch& s) {
    s.ahead.Advance(c, place, next);
    AttendPieces(place, queries, c.head_dim, s);
    for (int64_t q = 0; q < queries; ++q) {
      if (s.lse[q] != kNegativeInfinity) FinishOuts(s, q, c.head_dim);
    }
  }
};

}  // namespace

void AttentionAmx(const AttentionParams& p, Worker worker) {
  if (p.cache.type == DType::kBFloat16 && p.cache.head_dim % kStepDims == 0) {
    Attention<AmxAttention>(p, worker);
  } else {
    Attention<SimdAttention<Avx512>>(p, worker);
  }
}

void SparseAttentionAmx(const SparseAttentionParams& p, Worker worker) {
  if (p.cache.type == DType::kBFloat16 && p.cache.head_dim % kStepDims == 0) {
    SparseAttention<AmxAttention>(p, worker);
  } else {
    SparseAttention<SimdAttention<Avx512>>(p, worker);
  }
}

}  // namespace sluice::kernels::cpu
