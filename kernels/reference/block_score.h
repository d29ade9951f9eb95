// The score of a block by Fluxion's digest of it (LevelDigests), in float64.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/e4m3.h"
#include "kernels/fluxion_params.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

// Returns a query's score of a block of (slot, KV head), as LevelScores has it, rounded to float32.
inline float BlockScore(const float* q, const LevelDigests& digests, int32_t head_dim,
                        const FluxionSegments& segments, int32_t level, int64_t slot, int64_t block,
                        int64_t kv_head) {
  const DigestRows rows = RowsOfBlock(digests, segments, level, static_cast<int32_t>(block));
  const PagedRows& of_level = digests.of[rows.level];
  const bool has_spread = HasSpread(of_level, head_dim);
  const int64_t dim = head_dim;
  double best = -INFINITY;
  for (int64_t b = rows.begin; b < rows.end; ++b) {
    const auto* const row =
        static_cast<const uint8_t*>(of_level.base) + RowOffset(of_level, slot, b, kv_head);
    double of_row = -INFINITY, spread = 0;
    for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += double{q[d]} * E4M3ToFloat(row[piece * dim + d]);
      of_row = std::max(of_row, sum);
    }
    for (int64_t d = 0; has_spread && d < dim; ++d) {
      spread += double{q[d]} * double{q[d]} * E4M3ToFloat(row[kDigestPieces * dim + d]);
    }
    best = std::max(best, of_row + double{kFluxionDeviations} * std::sqrt(spread));
  }
  return static_cast<float>(best);
}

}  // namespace
}  // namespace sluice::kernels::reference
