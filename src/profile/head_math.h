// What sluice-profile computes of one head's captured queries and keys: attention weights,
// projections, and which rows of a prompt are measured.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// Returns the softmax over the first `tokens` keys of q k^T / sqrt(head_dim). `q` is [head_dim],
// `k` is [at least tokens][head_dim].
std::vector<float> AttentionWeights(const float* q, const std::vector<float>& k, int64_t tokens,
                                    int64_t head_dim);

// Returns x [rows][inner] times y [inner][columns].
std::vector<double> Times(absl::Span<const float> x, int64_t rows, absl::Span<const double> y,
                          int64_t inner, int64_t columns);

// Returns the distance between measured rows: 32 of `rows` rows, spread evenly, or all if there are
// fewer.
inline int64_t MeasuredRowStride(int64_t rows) { return std::max<int64_t>(1, rows / 32); }

}  // namespace sluice
