// Scores of blocks by Fluxion's digests, for the path "amx".
//
// Pieces become bf16, which has every e4m3 value, and are the rows of a tile: those of 4 digests,
// 32 elements at a time. A query is the sum of three bf16, which are all of its 24 bits, and each
// of them is a column of the other tile, so that four query heads take 12 columns. Spreads are
// multiplied with the squares of the queries in the same way. A tile adds the products of a row and
// a column in float32, by rising k, in an order that does not depend on other rows and columns.
//
// Digests of the next batch are converted between the products of this one, since tiles cannot load
// what has just been stored without waiting for it.
#include <immintrin.h>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_level_scores.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kStepDims = 32;  // elements of a tile's row
constexpr int64_t kTileWords = kTileRows * kStepDims;
constexpr int64_t kTileHeads = 4;  // query heads of a tile
constexpr int64_t kQueryParts = 3;
constexpr int64_t kCodes = 64;  // e4m3 codes that are converted at a time

// The bytes of the bf16 values that the positive codes of e4m3 are.
struct Bf16Bytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
};
constexpr Bf16Bytes MakeBf16Bytes() {
  Bf16Bytes bytes;
  for (int code = 0; code < 128; ++code) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, E4M3ToFloat(static_cast<uint8_t>(code)));
    bytes.low[code] = static_cast<uint8_t>(bits >> 16);
    bytes.high[code] = static_cast<uint8_t>(bits >> 24);
  }
  return bytes;
}
constexpr Bf16Bytes kBf16Bytes = MakeBf16Bytes();

// Keeps g++ 12 from loading a value anew for each of its uses.
inline __m512i InRegister(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}

// Converts `count` codes to bf16, `count` a multiple of kCodes. Bytes are interleaved within lanes
// of 128 bits, so that of the two steps that 64 elements are, the first has the lower eight of each
// sixteen, and the second the upper eight; PutQuery orders a query alike.
inline void ConvertCodes(const uint8_t* codes, int64_t count, uint16_t* out) {
  const __m512i low0 = InRegister(_mm512_load_si512(kBf16Bytes.low));
  const __m512i low1 = InRegister(_mm512_load_si512(kBf16Bytes.low + 64));
  const __m512i high0 = InRegister(_mm512_load_si512(kBf16Bytes.high));
  const __m512i high1 = InRegister(_mm512_load_si512(kBf16Bytes.high + 64));
  const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
  for (int64_t i = 0; i < count; i += kCodes) {
    const __m512i v = InRegister(_mm512_loadu_si512(codes + i));
    // The lookup ignores the sign, the highest bit of a code.
    const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, v, high1);
    // That is magnitude | (v & sign).
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, v, sign, 0xF8);
    _mm512_store_si512(out + i, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(out + i + kStepDims, _mm512_unpackhi_epi8(low, high));
  }
}

// Returns floats [0, 8) and [16, 24) of those at `from`.
inline __m512 LoadEights(const float* from) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(from)),
                            _mm256_loadu_ps(from + 16), 1);
}

// Writes the three parts of `dim` floats to their columns of the tiles of all steps, of which
// `column` is that of the first part.
inline void PutQuery(const float* q, int64_t dim, uint16_t* tiles, int64_t column) {
  const __m512i pairs =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(kTileBytes));
  for (int64_t step = 0; step < dim / kStepDims; ++step) {
    const float* const from = q + step / 2 * kCodes + step % 2 * 8;
    __m512 x0 = LoadEights(from), x1 = LoadEights(from + 32);
    for (int64_t part = 0; part < kQueryParts; ++part) {
      const __m512 high0 = HighPart(x0), high1 = HighPart(x1);
      uint16_t* const to = tiles + step * kTileWords + (part * kTileHeads + column) * 2;
      _mm512_i32scatter_epi32(to, pairs, PackBf16(high0, high1), 1);
      x0 = _mm512_sub_ps(x0, high0);
      x1 = _mm512_sub_ps(x1, high1);
    }
  }
}

// Returns the sums of the products with the three parts of four queries.
inline __m128 AddParts(const float* row) {
  return _mm_add_ps(_mm_load_ps(row), _mm_add_ps(_mm_load_ps(row + 4), _mm_load_ps(row + 8)));
}

class AmxLevelRows {
 public:
  static constexpr int64_t kRows = 8;
  using Batch = RowBatch<kRows>;

  // Tiles 0, 1 and 2 are products of the pieces of four digests, of those of the other four, and of
  // the spreads of all eight; tiles 4, 5 and 6 are these pieces and spreads; 3 and 7 are queries.
  AmxLevelRows(int64_t dim, bool has_spread)
      : dim_(dim), steps_(dim / kStepDims), has_spread_(has_spread) {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
      config.column_bytes[t] = kTileBytes;
      config.rows[t] = t == 2 || t == 6 ? kRows : kTileRows;
    }
    Written(&config);
    _tile_loadconfig(&config);
  }
  ~AmxLevelRows() { _tile_release(); }
  AmxLevelRows(const AmxLevelRows&) = delete;
  AmxLevelRows& operator=(const AmxLevelRows&) = delete;

  void Begin(const LevelQueries& queries, const Batch& first) {
    tiles_ = CeilDiv(queries.count, kTileHeads);
    const int64_t vectors = has_spread_ ? 2 : 1;
    for (int64_t i = 0; i < vectors * tiles_ * steps_ * kTileWords; i += kStepDims) {
      _mm512_store_si512(queries_ + i, _mm512_setzero_si512());
    }
    for (int64_t i = 0; i < vectors; ++i) {
      for (int64_t h = 0; h < queries.count; ++h) {
        PutQuery(queries.of + (2 * h + i) * dim_, dim_, QueryTiles(i, h / kTileHeads),
                 h % kTileHeads);
      }
    }
    for (int64_t i = 0; i < kRows; ++i) Convert(first, i);
  }

  void Score(const Batch& now, const Batch& next, const Batch& after,
             float (*scores)[kScoreColumns]) {
    const Converted& rows = converted_[turn_];
    turn_ = 1 - turn_;
    Written(this);
    int64_t row = 0;
    const auto convert_to = [&](int64_t end) {
      for (; row < end; ++row) {
        after.AskFor(row, row_bytes());
        if (next.count > 0) Convert(next, row);
      }
    };
    const int64_t turns = tiles_ * (steps_ + 1);
    for (int64_t tile = 0, turn = 1; tile < tiles_; ++tile) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      for (int64_t step = 0; step < steps_; ++step, ++turn) {
        MultiplyStep(rows, tile, step);
        convert_to(kRows * turn / turns);
      }
      _tile_stored(0, sums_[0], kTileBytes);
      _tile_stored(1, sums_[1], kTileBytes);
      if (has_spread_) _tile_stored(2, sums_[2], kTileBytes);
      convert_to(kRows * turn++ / turns);
      for (int64_t i = 0; i < now.count; ++i) Finish(i, scores[i] + tile * kTileHeads);
    }
  }

 private:
  // Digests in bf16, the elements in the order that ConvertCodes leaves.
  struct Converted {
    alignas(64) uint16_t pieces[kRows * kDigestPieces * kMaxHeadDim];
    alignas(64) uint16_t spreads[kRows * kMaxHeadDim];
  };

  int64_t row_bytes() const { return (has_spread_ ? kDigestVectors : kDigestPieces) * dim_; }

  // Returns the tiles [step][16 pairs of elements][16 columns][2] of four queries, or of their
  // squares.
  uint16_t* QueryTiles(int64_t squares, int64_t tile) {
    return queries_ + (squares * tiles_ + tile) * steps_ * kTileWords;
  }

  // Converts a row for the next call of Score; one that does not exist is zeros.
  void Convert(const Batch& batch, int64_t row) {
    Converted& out = converted_[turn_];
    uint16_t* const pieces = out.pieces + row * kDigestPieces * dim_;
    uint16_t* const spread = out.spreads + row * dim_;
    if (row < batch.count) {
      ConvertCodes(batch.rows[row], kDigestPieces * dim_, pieces);
      if (has_spread_) ConvertCodes(batch.rows[row] + kDigestPieces * dim_, dim_, spread);
      return;
    }
    for (int64_t i = 0; i < kDigestPieces * dim_; ++i) pieces[i] = 0;
    for (int64_t i = 0; i < dim_; ++i) spread[i] = 0;
  }

  void MultiplyStep(const Converted& rows, int64_t tile, int64_t step) {
    const int64_t row_stride = dim_ * 2;
    const uint16_t* const pieces = rows.pieces + step * kStepDims;
    _tile_loadd(3, QueryTiles(0, tile) + step * kTileWords, kTileBytes);
    _tile_loadd(4, pieces, row_stride);
    _tile_dpbf16ps(0, 4, 3);
    _tile_loadd(5, pieces + kTileRows * dim_, row_stride);
    _tile_dpbf16ps(1, 5, 3);
    if (!has_spread_) return;
    _tile_loadd(7, QueryTiles(1, tile) + step * kTileWords, kTileBytes);
    _tile_loadd(6, rows.spreads + step * kStepDims, row_stride);
    _tile_dpbf16ps(2, 6, 7);
  }

  // Makes the four scores of a row from its products.
  void Finish(int64_t row, float* scores) const {
    const float* const pieces = sums_[row / 4] + row % 4 * (kDigestPieces * kScoreColumns);
    __m128 score = _mm_max_ps(
        _mm_max_ps(AddParts(pieces), AddParts(pieces + kScoreColumns)),
        _mm_max_ps(AddParts(pieces + 2 * kScoreColumns), AddParts(pieces + 3 * kScoreColumns)));
    if (has_spread_) {
      const __m128 spread = _mm_max_ps(AddParts(sums_[2] + row * kScoreColumns), _mm_setzero_ps());
      score = _mm_fmadd_ps(_mm_set1_ps(kFluxionDeviations), _mm_sqrt_ps(spread), score);
    }
    _mm_store_ps(scores, score);
  }

  const int64_t dim_, steps_;
  const bool has_spread_;
  int64_t tiles_ = 0;  // of kTileHeads queries
  int64_t turn_ = 0;   // which of converted_ is written next
  alignas(
      64) uint16_t queries_[2 * kScoreHeads / kTileHeads * kMaxHeadDim / kStepDims * kTileWords];
  Converted converted_[2];
  alignas(64) float sums_[3][kTileRows * kScoreColumns];
};

}  // namespace

void LevelScoresAmx(const LevelScoresParams& p, Worker worker) {
  if (p.head_dim % kCodes == 0) {
    LevelScores<AmxLevelRows>(p, worker);
  } else {
    LevelScores<SimdLevelRows<Avx512>>(p, worker);
  }
}

}  // namespace sluice::kernels::cpu
