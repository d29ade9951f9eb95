// The reference of AnchorStatistics.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference/block_score.h"
#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

using Vector = std::vector<double>;

double Length(const Vector& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

// The row's K and V of one KV head.
struct Rows {
  const PagedCache& cache;
  int64_t slot, head;

  Vector Key(int64_t token) const { return At(KeyIndex(cache, slot, token, head)); }
  Vector Value(int64_t token) const {
    return At(KeyIndex(cache, slot, token, head) + int64_t{cache.block_tokens} * cache.head_dim);
  }
  Vector At(int64_t index) const {
    Vector row;
    for (int64_t d = 0; d < cache.head_dim; ++d) {
      row.push_back(Get(cache.base, cache.type, index + d));
    }
    return row;
  }
};

// Writes mean, variance, skewness and kurtosis.
void PutMoments(const Vector& x, float* out) {
  std::fill_n(out, 4, 0.0f);
  if (x.empty()) return;
  const auto count = static_cast<double>(x.size());
  const double mean = std::accumulate(x.begin(), x.end(), 0.0) / count;
  double second = 0, third = 0, fourth = 0;
  for (double value : x) {
    const double off = value - mean;
    second += off * off / count;
    third += off * off * off / count;
    fourth += off * off * off * off / count;
  }
  out[0] = static_cast<float>(mean);
  out[1] = static_cast<float>(second);
  if (second > 0) {
    out[2] = static_cast<float>(third / std::pow(second, 1.5));
    out[3] = static_cast<float>(fourth / (second * second));
  }
}

// Returns sums of weighted values over their weights; zeros where there is no weight.
Vector Divided(const Vector& sums, double weight) {
  Vector o(sums.size());
  for (size_t d = 0; d < o.size(); ++d) o[d] = weight > 0 ? sums[d] / weight : 0;
  return o;
}

// Tokens' weights and weighted values, added up.
struct Sums {
  explicit Sums(int64_t dim) : values(static_cast<size_t>(dim)) {}
  void Add(double by, const Vector& value) {
    weight += by;
    for (size_t d = 0; d < values.size(); ++d) values[d] += by * value[d];
  }
  void Add(const Sums& other) {
    weight += other.weight;
    for (size_t d = 0; d < values.size(); ++d) values[d] += other.values[d];
  }
  Vector Output() const { return Divided(values, weight); }

  double weight = 0;
  Vector values;
};

// A query head's attention to the row's tokens.
class HeadAttention {
 public:
  HeadAttention(const AnchorStatisticsParams& p, int64_t row, int64_t head)
      : p_(p),
        q_(p.q + row * p.q_stride + head * p.cache.head_dim),
        rows_{p.cache, p.slots[row], head / (p.heads / p.cache.kv_heads)},
        segments_(SegmentsOf(p.positions[row])) {
    for (int64_t t = 0; t < segments_.end; ++t) {
      const Vector key = rows_.Key(t);
      dots_.push_back(std::inner_product(key.begin(), key.end(), q_, 0.0));
    }
  }

  // Returns the sums over tokens [begin, end) relative to the score `largest`.
  Sums SumsOf(int64_t begin, int64_t end, double largest) const {
    Sums sums(p_.cache.head_dim);
    for (int64_t t = begin; t < end; ++t) sums.Add(std::exp(Score(t) - largest), rows_.Value(t));
    return sums;
  }
  double Largest(int64_t begin, int64_t end) const {
    double largest = kMinusInfinity;
    for (int64_t t = begin; t < end; ++t) largest = std::max(largest, Score(t));
    return largest;
  }
  Sums Whole() const { return SumsOf(0, segments_.end, Largest(0, segments_.end)); }
  // Returns the sums of the default set relative to `largest`.
  Sums Default(double largest) const {
    Sums sums = SumsOf(0, segments_.sink, largest);
    sums.Add(SumsOf(segments_.local, segments_.end, largest));
    return sums;
  }
  double ResidentLength() const {
    return Length(
        Default(std::max(Largest(0, segments_.sink), Largest(segments_.local, segments_.end)))
            .Output());
  }

  // Writes everything about the head; its budgets are those of errors up to `bound`.
  void Write(double bound, float* out) const {
    const int64_t dim = p_.cache.head_dim;
    const double length = Length(Vector(q_, q_ + dim));
    Vector z;
    for (int64_t t = segments_.sink; t < segments_.local; ++t) {
      const double dot = dots_[static_cast<size_t>(t)];
      z.push_back(length > 0 ? dot / (length * std::sqrt(static_cast<double>(dim))) : 0);
    }
    PutMoments(z, out);
    const int64_t bounds[4] = {0, segments_.sink, segments_.local, segments_.end};
    for (int i = 0; i < 3; ++i) {
      const double largest = Largest(bounds[i], bounds[i + 1]);
      const Sums sums = SumsOf(bounds[i], bounds[i + 1], largest);
      out[4 + i] = static_cast<float>(largest + std::log(sums.weight));
      out[7 + i] = static_cast<float>(Length(sums.Output()));
    }
    out[10] = static_cast<float>(length);
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      out[11 + level] = Budget(level, bound);
    }
    std::copy_n(q_, dim, out + kAnchorHeadNumbers);
  }

 private:
  double Score(int64_t token) const { return double{p_.scale} * dots_[static_cast<size_t>(token)]; }

  float Budget(int32_t level, double bound) const {
    const int64_t first = FirstBlock(segments_, level), count = CpuBlocks(segments_, level);
    if (count == 0) return 0;
    std::vector<float> scores;
    for (int64_t b = 0; b < count; ++b) {
      scores.push_back(BlockScore(q_, p_.digests, p_.cache.head_dim, segments_, level, rows_.slot,
                                  first + b, rows_.head));
    }
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    const double largest = Largest(0, segments_.end);
    const Vector whole = Whole().Output();
    Sums prefix = Default(largest);
    int64_t wanted = 0;
    for (int64_t n = 0; n < count; ++n) {  // the prefix of all blocks has no error
      Vector off = prefix.Output();
      for (size_t d = 0; d < off.size(); ++d) off[d] -= whole[d];
      if (!(Length(off) <= bound)) wanted = n + 1;
      const int64_t begin = (first + order[static_cast<size_t>(n)]) * LevelTokens(level);
      prefix.Add(
          SumsOf(std::max<int64_t>(begin, segments_.sink), begin + LevelTokens(level), largest));
    }
    const auto tokens = static_cast<double>(wanted * LevelTokens(level));
    return static_cast<float>(std::min(1.0, tokens / static_cast<double>(CpuTokens(segments_))));
  }

  const AnchorStatisticsParams& p_;
  const float* const q_;
  const Rows rows_;
  const FluxionSegments segments_;
  Vector dots_;
};

void WriteKvHead(const AnchorStatisticsParams& p, int64_t row, int64_t head) {
  const int64_t dim = p.cache.head_dim, slot = p.slots[row];
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const Rows rows{p.cache, slot, head};
  float* const out = p.anchors.kv + (slot * p.cache.kv_heads + head) * (kAnchorKvNumbers + dim);
  for (int i = 0; i < 2; ++i) {
    Vector sink, cpu;
    Sums sums(dim);
    for (int64_t t = 0; t < segments.local; ++t) {
      const Vector of_token = i == 0 ? rows.Key(t) : rows.Value(t);
      (t < segments.sink ? sink : cpu).push_back(Length(of_token));
      if (t >= segments.sink) sums.Add(1, of_token);
    }
    const Vector mean = sums.Output();
    out[i] = static_cast<float>(std::accumulate(sink.begin(), sink.end(), 0.0) /
                                static_cast<double>(sink.size()));
    out[2 + i] = static_cast<float>(Length(mean));
    PutMoments(cpu, out + 4 + 4 * i);
    if (i > 0) continue;
    for (int64_t d = 0; d < dim; ++d) {
      out[kAnchorKvNumbers + d] = static_cast<float>(mean[static_cast<size_t>(d)]);
    }
  }
}

void WriteRow(const AnchorStatisticsParams& p, int64_t row) {
  for (int64_t h = 0; h < p.cache.kv_heads; ++h) WriteKvHead(p, row, h);
  std::vector<HeadAttention> heads;
  double largest = 0, resident = 0;
  for (int64_t h = 0; h < p.heads; ++h) {
    heads.emplace_back(p, row, h);
    largest = std::max(largest, Length(heads.back().Whole().Output()));
    resident = std::max(resident, heads.back().ResidentLength());
  }
  const int64_t width = kAnchorHeadNumbers + p.cache.head_dim;
  for (int64_t h = 0; h < p.heads; ++h) {
    heads[static_cast<size_t>(h)].Write(double{p.tau} * largest,
                                        p.anchors.heads + (p.slots[row] * p.heads + h) * width);
  }
  p.anchors.resident[p.slots[row]] = static_cast<float>(resident);
}

}  // namespace

// This needs no scratch, so that rows need not follow one another.
void AnchorStatistics(const AnchorStatisticsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] >= 0) WriteRow(p, r);
  }
}

}  // namespace sluice::kernels::reference
