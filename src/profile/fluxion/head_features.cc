#include "src/profile/fluxion/head_features.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

using kernels::CpuTokens;

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

std::vector<double> MeanRow(const float* rows, int64_t begin, int64_t end, int64_t dim) {
  std::vector<double> mean(static_cast<size_t>(dim));
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t d = 0; d < dim; ++d) mean[static_cast<size_t>(d)] += double{rows[t * dim + d]};
  }
  for (double& m : mean) m /= static_cast<double>(std::max<int64_t>(end - begin, 1));
  return mean;
}

}  // namespace

std::vector<double> RowLengths(const float* rows, int64_t begin, int64_t end, int64_t dim) {
  std::vector<double> lengths;
  for (int64_t t = begin; t < end; ++t) {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += double{rows[t * dim + d]} * double{rows[t * dim + d]};
    lengths.push_back(std::sqrt(sum));
  }
  return lengths;
}

Moments MomentsOf(const std::vector<double>& values) {
  Moments out;
  if (values.empty()) return out;
  const auto count = static_cast<double>(values.size());
  out.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double third = 0, fourth = 0;
  for (const double value : values) {
    const double off = value - out.mean;
    out.variance += off * off / count;
    third += off * off * off / count;
    fourth += off * off * off * off / count;
  }
  if (out.variance > 0) {
    out.skewness = third / std::pow(out.variance, 1.5);
    out.kurtosis = fourth / (out.variance * out.variance);
  }
  return out;
}

AnchorCache MeasureCache(const HeadCache& cache, const kernels::FluxionSegments& segments) {
  const int64_t dim = cache.head_dim;
  AnchorCache out;
  out.mean_key = MeanRow(cache.k, segments.sink, segments.local, dim);
  const std::vector<double> mean_value = MeanRow(cache.v, segments.sink, segments.local, dim);
  const Moments keys = MomentsOf(RowLengths(cache.k, segments.sink, segments.local, dim));
  const Moments values = MomentsOf(RowLengths(cache.v, segments.sink, segments.local, dim));
  out.numbers = {MomentsOf(RowLengths(cache.k, 0, segments.sink, dim)).mean,
                 MomentsOf(RowLengths(cache.v, 0, segments.sink, dim)).mean,
                 std::sqrt(Dot(out.mean_key, out.mean_key)),
                 std::sqrt(Dot(mean_value, mean_value)),
                 keys.mean,
                 keys.variance,
                 keys.skewness,
                 keys.kurtosis,
                 values.mean,
                 values.variance,
                 values.skewness,
                 values.kurtosis};
  return out;
}

AnchorHead MeasureAnchor(const GroupAttention& attention, int64_t g, double bound) {
  AnchorHead out;
  out.z = MomentsOf(attention.Interactions(g));
  out.lse = {attention.sink(g).lse, attention.cpu(g).lse, attention.local(g).lse};
  out.lengths = {attention.sink(g).Length(), attention.cpu(g).Length(),
                 attention.local(g).Length()};
  out.q = attention.Query(g);
  out.q_length = std::sqrt(Dot(out.q, out.q));
  for (int32_t level = 0; level < kernels::kFluxionLevels; ++level) {
    out.budgets[static_cast<size_t>(level)] = attention.Budget(g, level, bound);
  }
  return out;
}

std::array<float, kernels::kFluxionFeatures> HeadFeatures(const FeatureRow& row, int64_t head,
                                                          const GroupAttention& attention,
                                                          int64_t g, const AnchorCache& cache,
                                                          const AnchorHead& anchor) {
  const kernels::FluxionSegments& segments = attention.segments();
  const std::vector<double> q = attention.Query(g);
  const double length = std::sqrt(Dot(q, q));
  const double mean = Dot(q, cache.mean_key) / (length * std::sqrt(static_cast<double>(q.size())));
  std::vector<double> all = {static_cast<double>(row.layer), static_cast<double>(head),
                             static_cast<double>(CpuTokens(segments)),
                             static_cast<double>(segments.end - CpuTokens(segments))};
  const auto add = [&all](const auto& values) {
    all.insert(all.end(), values.begin(), values.end());
  };
  add(cache.numbers);
  add(std::array{mean, anchor.z.mean, anchor.z.variance, anchor.z.skewness, anchor.z.kurtosis});
  add(std::array{attention.sink(g).lse,
                 std::log(static_cast<double>(CpuTokens(segments))) + length * mean +
                     length * length * anchor.z.variance / 2,
                 attention.local(g).lse});
  add(anchor.lse);
  add(std::array{attention.sink(g).Length(), attention.local(g).Length()});
  add(anchor.lengths);
  add(std::array{length, anchor.q_length, Dot(q, anchor.q) / (length * anchor.q_length)});
  add(anchor.budgets);
  add(std::array{row.resident, row.anchor_resident});
  SLUICE_CHECK(all.size() == kernels::kFluxionFeatures);
  std::array<float, kernels::kFluxionFeatures> out;
  std::transform(all.begin(), all.end(), out.begin(),
                 [](double feature) { return static_cast<float>(feature); });
  return out;
}

}  // namespace sluice
