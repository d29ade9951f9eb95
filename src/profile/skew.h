// InfiniGen's skew (OSDI 24, arXiv 2406.19707, section 4.2): an orthogonal A for each KV head, so
// that (q A)(k A)^T = q k^T while few columns of q A carry most of it. Those columns are the
// partial queries and keys of policy `recall`.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// Returns the projection [head_dim][rank] of one KV head: the `rank` columns of A with the largest
// sum |q A|, where A is the right singular vectors of the queries. `q` is [rows][head_dim]: the
// queries of all query heads of its group, after RoPE and q_norm. REQUIRES: 0 < rank <= head_dim.
std::vector<float> SkewOf(absl::Span<const float> q, int64_t head_dim, int64_t rank);

// Returns how well partial scores order keys: Spearman's correlation of (q P)(k P)^T with q k^T
// over the rows of k, as the mean over the rows of q. `projection` is [head_dim][rank]. Returns 0
// if there is nothing to order.
double RankCorrelation(absl::Span<const float> q, absl::Span<const float> k,
                       absl::Span<const float> projection, int64_t head_dim, int64_t rank);

}  // namespace sluice
