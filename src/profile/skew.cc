#include "src/profile/skew.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/base/status_macros.h"
#include "src/profile/head_math.h"
#include "src/profile/svd.h"

namespace sluice {
namespace {

// Returns the rank of each value in ascending order; equal values are ordered by index.
std::vector<double> Ranks(const std::vector<double>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t i = 0; i < order.size(); ++i) ranks[order[i]] = static_cast<double>(i);
  return ranks;
}

}  // namespace

std::vector<float> SkewOf(absl::Span<const float> q, int64_t head_dim, int64_t rank) {
  SLUICE_CHECK(0 < rank && rank <= head_dim);
  const int64_t rows = static_cast<int64_t>(q.size()) / head_dim;
  const Svd svd = SvdOf(std::vector<double>(q.begin(), q.end()), rows, head_dim);
  const std::vector<double> skewed = Times(q, rows, svd.v, head_dim, head_dim);
  std::vector<double> weight(static_cast<size_t>(head_dim));
  for (size_t i = 0; i < skewed.size(); ++i) {
    weight[i % static_cast<size_t>(head_dim)] += std::abs(skewed[i]);
  }
  std::vector<int64_t> columns(static_cast<size_t>(head_dim));
  std::iota(columns.begin(), columns.end(), 0);
  std::stable_sort(columns.begin(), columns.end(), [&](int64_t a, int64_t b) {
    return weight[static_cast<size_t>(a)] > weight[static_cast<size_t>(b)];
  });
  std::vector<float> projection(static_cast<size_t>(head_dim * rank));
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int64_t r = 0; r < rank; ++r) {
      projection[static_cast<size_t>(d * rank + r)] = static_cast<float>(
          svd.v[static_cast<size_t>(d * head_dim + columns[static_cast<size_t>(r)])]);
    }
  }
  return projection;
}

double RankCorrelation(absl::Span<const float> q, absl::Span<const float> k,
                       absl::Span<const float> projection, int64_t head_dim, int64_t rank) {
  const int64_t queries = static_cast<int64_t>(q.size()) / head_dim;
  const int64_t keys = static_cast<int64_t>(k.size()) / head_dim;
  if (queries == 0 || keys < 2) return 0;
  const std::vector<double> p(projection.begin(), projection.end());
  const std::vector<double> partial_q = Times(q, queries, p, head_dim, rank);
  const std::vector<double> partial_k = Times(k, keys, p, head_dim, rank);
  std::vector<double> exact(static_cast<size_t>(keys)), partial(exact.size());
  double sum = 0;
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t t = 0; t < keys; ++t) {
      exact[static_cast<size_t>(t)] = std::inner_product(
          &q[static_cast<size_t>(i * head_dim)], &q[static_cast<size_t>(i * head_dim)] + head_dim,
          &k[static_cast<size_t>(t * head_dim)], 0.0);
      partial[static_cast<size_t>(t)] =
          std::inner_product(&partial_q[static_cast<size_t>(i * rank)],
                             &partial_q[static_cast<size_t>(i * rank)] + rank,
                             &partial_k[static_cast<size_t>(t * rank)], 0.0);
    }
    // Spearman's formula for ranks without ties: 1 - 6 sum d^2 / (n (n^2 - 1)).
    const std::vector<double> a = Ranks(exact), b = Ranks(partial);
    double squares = 0;
    for (size_t t = 0; t < a.size(); ++t) squares += (a[t] - b[t]) * (a[t] - b[t]);
    const auto n = static_cast<double>(keys);
    sum += 1 - 6 * squares / (n * (n * n - 1));
  }
  return sum / static_cast<double>(queries);
}

}  // namespace sluice
