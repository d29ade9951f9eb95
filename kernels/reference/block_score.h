// The score of a block by Fluxion's digest of it (LevelDigests), in float64.
#pragma once

#include <cmath>

#include "kernels/fluxion_params.h"
#include "kernels/reference/element.h"

namespace sluice::kernels::reference {
namespace {

// Returns a query's score of the block (slot, block) of a KV head: sum_d q_d mean_d +
// kFluxionDeviations * sqrt(sum_d q_d^2 variance_d), rounded to float32.
inline float BlockScore(const float* q, const PagedRows& digests, int64_t slot, int64_t block,
                        int64_t kv_head) {
  const int64_t dim = digests.dim / 2;
  const char* const row =
      static_cast<const char*>(digests.base) + RowOffset(digests, slot, block, kv_head);
  double mean = 0, variance = 0;
  for (int64_t d = 0; d < dim; ++d) {
    mean += double{q[d]} * Get(row, digests.type, d);
    variance += double{q[d]} * double{q[d]} * Get(row, digests.type, dim + d);
  }
  return static_cast<float>(mean + double{kFluxionDeviations} * std::sqrt(variance));
}

}  // namespace
}  // namespace sluice::kernels::reference
