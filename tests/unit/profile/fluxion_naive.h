// Small layers of random keys and values, and attention to them by sums that nothing shortens: what
// the measurements of `sluice-profile fluxion` are checked against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "src/base/rng.h"
#include "src/profile/query_capture.h"

namespace sluice {

inline constexpr int kDim = 8;

inline float Drawn(SplitMix64& random) { return static_cast<float>(2 * random.Uniform() - 1); }

// A layer of one KV head: keys in clusters, so that some blocks matter more than others.
inline CapturedQueries Layer(SplitMix64& random, int64_t tokens, int64_t group, float spread = 2) {
  CapturedQueries captured;
  captured.layers = 1;
  captured.kv_heads = 1;
  captured.head_dim = kDim;
  HeadQueries& head = captured.heads.emplace_back();
  std::vector<float> centre(kDim);
  for (int64_t t = 0; t < tokens; ++t) {
    if (t % 24 == 0)
      std::generate(centre.begin(), centre.end(), [&] { return spread * Drawn(random); });
    for (const float c : centre) {
      head.k.push_back(c + 0.3f * Drawn(random));
      head.v.push_back(Drawn(random));
    }
  }
  for (int64_t i = 0; i < tokens * group * kDim; ++i) head.q.push_back(3 * Drawn(random));
  return captured;
}

// Attention of one query to the tokens of which `counts` says that they count.
inline std::vector<double> NaiveAttention(const HeadQueries& head, const float* q, int64_t tokens,
                                          const std::function<bool(int64_t)>& counts,
                                          double* lse = nullptr) {
  std::vector<double> o(kDim);
  double sum = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    if (!counts(t)) continue;
    double dot = 0;
    for (int64_t d = 0; d < kDim; ++d) {
      dot += double{q[d]} * double{head.k[static_cast<size_t>(t * kDim + d)]};
    }
    const double weight = std::exp(dot / std::sqrt(double{kDim}));
    sum += weight;
    for (size_t d = 0; d < kDim; ++d) {
      o[d] += weight * double{head.v[static_cast<size_t>(t) * kDim + d]};
    }
  }
  for (double& x : o) x = sum > 0 ? x / sum : 0;
  if (lse != nullptr) *lse = std::log(sum);
  return o;
}

inline double Length(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}
inline double Distance(std::vector<double> a, const std::vector<double>& b) {
  for (size_t d = 0; d < a.size(); ++d) a[d] -= b[d];
  return Length(a);
}

}  // namespace sluice
