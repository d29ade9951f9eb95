#include "src/attention/policies/clo/hash_matrix.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace sluice {
namespace {

// Replaces `count` vectors of `dim` numbers, at most `dim` of them, by orthogonal ones of length 1
// (Gram and Schmidt).
void Orthogonalise(int64_t count, int64_t dim, std::vector<double>* vectors) {
  for (int64_t i = 0; i < count; ++i) {
    double* const x = vectors->data() + i * dim;
    for (int64_t j = 0; j < i; ++j) {
      const double* const y = vectors->data() + j * dim;
      double product = 0;
      for (int64_t d = 0; d < dim; ++d) product += x[d] * y[d];
      for (int64_t d = 0; d < dim; ++d) x[d] -= product * y[d];
    }
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) squares += x[d] * x[d];
    for (int64_t d = 0; d < dim; ++d) x[d] /= std::sqrt(squares);
  }
}

}  // namespace

std::vector<float> RandomHash(const HashShape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const int64_t dim = shape.head_dim;
  std::vector<float> hash(static_cast<size_t>(shape.elements()));
  const int64_t all_heads = std::max(shape.all_kv_heads, shape.kv_heads);
  for (int64_t drawn = 0; drawn < shape.layers * all_heads; ++drawn) {
    const int64_t head = drawn % all_heads - shape.first_kv_head;
    const bool here = head >= 0 && head < shape.kv_heads;
    const int64_t matrix = here ? drawn / all_heads * shape.kv_heads + head : 0;
    float* const of_head = hash.data() + matrix * dim * shape.bits;
    for (int64_t first = 0; first < shape.bits; first += dim) {
      const int64_t count = std::min(dim, shape.bits - first);
      std::vector<double> vectors(static_cast<size_t>(count * dim));
      for (double& x : vectors) x = normal(random);
      if (!here) continue;  // Another rank has the head. Its numbers are drawn all the same.
      Orthogonalise(count, dim, &vectors);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t d = 0; d < dim; ++d) {
          of_head[d * shape.bits + first + i] =
              static_cast<float>(vectors[static_cast<size_t>(i * dim + d)]);
        }
      }
    }
  }
  return hash;
}

}  // namespace sluice
