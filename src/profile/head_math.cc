#include "src/profile/head_math.h"

#include <algorithm>
#include <cmath>

namespace sluice {

std::vector<float> AttentionWeights(const float* q, const std::vector<float>& k, int64_t tokens,
                                    int64_t head_dim) {
  std::vector<float> weights(static_cast<size_t>(tokens));
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  float largest = -INFINITY;
  for (int64_t t = 0; t < tokens; ++t) {
    float dot = 0;
    const float* const key = k.data() + t * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) dot += q[d] * key[d];
    largest = std::max(largest, weights[static_cast<size_t>(t)] = dot * scale);
  }
  double sum = 0;
  for (float& weight : weights) sum += weight = std::exp(weight - largest);
  for (float& weight : weights) weight = static_cast<float>(weight / sum);
  return weights;
}

std::vector<double> Times(absl::Span<const float> x, int64_t rows, absl::Span<const double> y,
                          int64_t inner, int64_t columns) {
  std::vector<double> out(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    double* row = &out[static_cast<size_t>(r * columns)];
    for (int64_t i = 0; i < inner; ++i) {
      const double factor = x[static_cast<size_t>(r * inner + i)];
      for (int64_t c = 0; c < columns; ++c)
        row[c] += factor * y[static_cast<size_t>(i * columns + c)];
    }
  }
  return out;
}

}  // namespace sluice
