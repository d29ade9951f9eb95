#include "src/profile/fluxion/group_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice {
namespace {

using kernels::CpuTokens;
using kernels::FluxionSegments;
using kernels::kDigestPieces;
using kernels::kDigestVectors;
using kernels::kFluxionLevels;
using kernels::LevelTokens;

double LogSumExp(double a, double b) {
  const double largest = std::max(a, b);
  if (largest == -INFINITY) return -INFINITY;
  return largest + std::log(std::exp(a - largest) + std::exp(b - largest));
}

// The sum has four parts, so that a term need not wait for the one before it.
double Dot(const float* a, const float* b, int64_t dim) {
  double sums[4] = {};
  int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    for (int64_t i = 0; i < 4; ++i) sums[i] += double{a[d + i]} * double{b[d + i]};
  }
  for (; d < dim; ++d) sums[0] += double{a[d]} * double{b[d]};
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

AttentionPart Merged(const AttentionPart& a, const AttentionPart& b) {
  AttentionPart out;
  out.lse = LogSumExp(a.lse, b.lse);
  out.o.resize(a.o.size());
  if (out.lse == -INFINITY) return out;
  const double of_a = std::exp(a.lse - out.lse), of_b = std::exp(b.lse - out.lse);
  for (size_t d = 0; d < out.o.size(); ++d) out.o[d] = of_a * a.o[d] + of_b * b.o[d];
  return out;
}

// Returns attention to units whose weights are relative to the score `largest`.
AttentionPart PartOf(const std::vector<double>& weights, const std::vector<double>& values,
                     double largest, int64_t dim) {
  AttentionPart part;
  part.o.resize(static_cast<size_t>(dim));
  double sum = 0;
  for (const double weight : weights) sum += weight;
  if (sum == 0) return part;
  for (size_t i = 0; i < weights.size(); ++i) {
    for (size_t d = 0; d < part.o.size(); ++d) part.o[d] += values[i * part.o.size() + d];
  }
  for (double& o : part.o) o /= sum;
  part.lse = largest + std::log(sum);
  return part;
}

// Returns the numbers of `values` from the largest to the smallest, the lower one first among
// equals.
std::vector<int32_t> Descending(const std::vector<double>& values, int32_t first) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), first);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a - first)] > values[static_cast<size_t>(b - first)];
  });
  return order;
}

}  // namespace

double AttentionPart::Length() const {
  return std::sqrt(std::inner_product(o.begin(), o.end(), o.begin(), 0.0));
}

UnitDigests::UnitDigests(const HeadCache& cache, int64_t tokens, bool has_spread)
    : dim_(cache.head_dim), has_spread_(has_spread) {
  constexpr int64_t kUnitTokens = LevelTokens(0), kPieceTokens = kUnitTokens / kDigestPieces;
  const int64_t blocks = tokens / kUnitTokens;
  vectors_.resize(static_cast<size_t>(blocks * kDigestVectors * dim_));
  for (int64_t t = 0; t < blocks * kUnitTokens; t += kPieceTokens) {
    float* const of_block = vectors_.data() + t / kUnitTokens * kDigestVectors * dim_;
    float* const mean = of_block + t % kUnitTokens / kPieceTokens * dim_;
    float* const spread = of_block + kDigestPieces * dim_;
    const float* const keys = cache.k + t * dim_;
    for (int64_t i = 0; i < kPieceTokens * dim_; ++i) mean[i % dim_] += keys[i] / kPieceTokens;
    for (int64_t i = 0; i < kPieceTokens * dim_; ++i) {
      const float off = keys[i] - mean[i % dim_];
      spread[i % dim_] += off * off / kUnitTokens;
    }
  }
}

double UnitDigests::Score(const float* q, int64_t block) const {
  const float* const of_block = vectors_.data() + block * kDigestVectors * dim_;
  double best = -INFINITY, spread = 0;
  for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
    best = std::max(best, Dot(q, of_block + piece * dim_, dim_));
  }
  if (!has_spread_) return best;
  for (int64_t d = 0; d < dim_; ++d) {
    spread += double{q[d]} * double{q[d]} * double{of_block[kDigestPieces * dim_ + d]};
  }
  return best + double{kernels::kFluxionDeviations} * std::sqrt(spread);
}

GroupAttention::GroupAttention(const HeadCache& cache, const UnitDigests& digests, const float* q,
                               int64_t group, const FluxionSegments& segments)
    : cache_(cache),
      q_(q),
      group_(group),
      segments_(segments),
      has_spread_(digests.has_spread()),
      heads_(static_cast<size_t>(group)) {
  const int64_t dim = cache.head_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  for (int64_t g = 0; g < group; ++g) {
    Head& head = heads_[static_cast<size_t>(g)];
    std::vector<double>& scores = head.scores;
    scores.resize(static_cast<size_t>(segments.end));
    for (int64_t t = 0; t < segments.end; ++t) {
      scores[static_cast<size_t>(t)] = scale * Dot(q + g * dim, cache.k + t * dim, dim);
    }
    head.largest = *std::max_element(scores.begin(), scores.end());
    for (int64_t unit = kernels::FirstBlock(segments, 0); unit < kernels::EndBlock(segments, 0);
         ++unit) {
      head.unit_scores.push_back(digests.Score(q + g * dim, unit));
    }
    head.units = UnitsOfSegment(head);
    head.sink = Part(scores, 0, segments.sink);
    head.local = Part(scores, segments.local, segments.end);
    head.cpu = PartOf(head.units.weights, head.units.values, head.largest, dim);
    const AttentionPart resident = Merged(head.sink, head.local);
    head.whole = Merged(resident, head.cpu);
    head.resident = std::exp(resident.lse - head.largest);
    for (const double o : resident.o) head.resident_sum.push_back(head.resident * o);
  }
}

AttentionPart GroupAttention::Part(const std::vector<double>& scores, int64_t begin,
                                   int64_t end) const {
  AttentionPart part;
  part.o.resize(static_cast<size_t>(cache_.head_dim));
  if (begin == end) return part;
  const double largest = *std::max_element(scores.begin() + begin, scores.begin() + end);
  double sum = 0;
  for (int64_t t = begin; t < end; ++t) {
    const double weight = std::exp(scores[static_cast<size_t>(t)] - largest);
    const float* const v = cache_.v + t * cache_.head_dim;
    sum += weight;
    for (size_t d = 0; d < part.o.size(); ++d) part.o[d] += weight * double{v[d]};
  }
  for (double& o : part.o) o /= sum;
  part.lse = largest + std::log(sum);
  return part;
}

double GroupAttention::Weight(const Head& head, int64_t token) const {
  return std::exp(head.scores[static_cast<size_t>(token)] - head.largest);
}

std::vector<int32_t> GroupAttention::TokenOrder(const Head& head, int64_t begin,
                                                int64_t end) const {
  const std::vector<double> of(head.scores.begin() + begin, head.scores.begin() + end);
  return Descending(of, static_cast<int32_t>(begin));
}

std::vector<double> GroupAttention::Query(int64_t g) const {
  const float* const q = q_ + g * cache_.head_dim;
  return std::vector<double>(q, q + cache_.head_dim);
}

AttentionPart GroupAttention::Resident(int64_t g) const { return Merged(Of(g).sink, Of(g).local); }

double GroupAttention::ResidentError(int64_t g) const {
  const AttentionPart resident = Resident(g);
  double error = 0;
  for (size_t d = 0; d < resident.o.size(); ++d) {
    const double off = resident.o[d] - Of(g).whole.o[d];
    error += off * off;
  }
  return std::sqrt(error);
}

// Four vectors in e4m3 are as many bytes as a key and a value in bf16. With a spread, level 0 alone
// has digests, and the cpu segment has a multiple of four of its blocks.
int64_t GroupAttention::DigestTokens(int32_t level) const {
  if (!has_spread_) return kernels::CpuBlocks(segments_, level);
  return int64_t{kernels::CpuBlocks(segments_, 0)} * kDigestVectors / kDigestPieces;
}

std::vector<double> GroupAttention::Interactions(int64_t g) const {
  const int64_t dim = cache_.head_dim;
  const float* const q = q_ + g * dim;
  const double length = std::sqrt(Dot(q, q, dim) * static_cast<double>(dim));
  std::vector<double> out;
  for (int64_t t = segments_.sink; t < segments_.local; ++t) {
    out.push_back(Dot(q, cache_.k + t * dim, dim) / length);
  }
  return out;
}

std::vector<int32_t> GroupAttention::Order(int64_t g, int32_t level) const {
  const int32_t first = kernels::FirstBlock(segments_, level);
  const int32_t first_unit = kernels::FirstBlock(segments_, 0);
  const std::vector<double>& units = Of(g).unit_scores;
  std::vector<double> scores(static_cast<size_t>(kernels::CpuBlocks(segments_, level)), -INFINITY);
  for (size_t i = 0; i < units.size(); ++i) {
    double& score =
        scores[static_cast<size_t>(((first_unit + static_cast<int32_t>(i)) >> level) - first)];
    score = std::max(score, units[i]);
  }
  return Descending(scores, first);
}

GroupAttention::Units GroupAttention::UnitsOfSegment(const Head& head) const {
  const auto dim = static_cast<size_t>(cache_.head_dim);
  const auto unit_tokens = static_cast<size_t>(LevelTokens(0));
  Units units;
  const auto tokens = static_cast<size_t>(CpuTokens(segments_));
  units.weights.resize(tokens / unit_tokens);
  units.values.resize(units.weights.size() * dim);
  for (size_t i = 0; i < tokens; ++i) {
    const int64_t token = segments_.sink + static_cast<int64_t>(i);
    const double weight = Weight(head, token);
    const float* const v = cache_.v + token * cache_.head_dim;
    double* const values = units.values.data() + i / unit_tokens * dim;
    units.weights[i / unit_tokens] += weight;
    for (size_t d = 0; d < dim; ++d) values[d] += weight * double{v[d]};
  }
  return units;
}

GroupAttention::Units GroupAttention::Blocks(const Head& head, int32_t level,
                                             const std::vector<int32_t>& order) const {
  const auto dim = static_cast<size_t>(cache_.head_dim);
  const int32_t first_unit = kernels::FirstBlock(segments_, 0);
  Units blocks;
  blocks.weights.resize(order.size());
  blocks.values.resize(order.size() * dim);
  for (size_t i = 0; i < order.size(); ++i) {
    double* const values = blocks.values.data() + i * dim;
    for (int32_t u = std::max(order[i] << level, first_unit); u < (order[i] + 1) << level; ++u) {
      const auto unit = static_cast<size_t>(u - first_unit);
      const double* const from = head.units.values.data() + unit * dim;
      blocks.weights[i] += head.units.weights[unit];
      for (size_t d = 0; d < dim; ++d) values[d] += from[d];
    }
  }
  return blocks;
}

// Errors need not fall as a prefix grows. So this takes units away from the end, and stops at the
// first prefix that breaks the bound.
size_t GroupAttention::Prefix(const Head& head, const Units& units, double bound) const {
  const auto dim = static_cast<size_t>(cache_.head_dim);
  double weight = head.resident;
  std::vector<double> sum = head.resident_sum;
  for (size_t i = 0; i < units.weights.size(); ++i) {
    weight += units.weights[i];
    for (size_t d = 0; d < dim; ++d) sum[d] += units.values[i * dim + d];
  }
  const double limit = bound * bound;
  for (size_t count = units.weights.size(); count > 0; --count) {
    weight -= units.weights[count - 1];
    const double* const values = units.values.data() + (count - 1) * dim;
    double error = 0;
    for (size_t d = 0; d < dim; ++d) {
      sum[d] -= values[d];
      const double off = sum[d] / weight - head.whole.o[d];
      error += off * off;
    }
    if (!(error <= limit)) return count;
  }
  return 0;
}

double GroupAttention::Budget(int64_t g, int32_t level, double bound) const {
  if (CpuTokens(segments_) == 0) return 0;
  const int64_t unit = LevelTokens(level);
  const size_t count = Prefix(Of(g), Blocks(Of(g), level, Order(g, level)), bound);
  return std::min(1.0, static_cast<double>(static_cast<int64_t>(count) * unit) /
                           static_cast<double>(CpuTokens(segments_)));
}

double GroupAttention::TokenBudget(int64_t g, double bound) const {
  if (CpuTokens(segments_) == 0) return 0;
  const Head& head = Of(g);
  const auto dim = static_cast<size_t>(cache_.head_dim);
  Units tokens;
  for (const int32_t t : TokenOrder(head, segments_.sink, segments_.local)) {
    const double weight = Weight(head, t);
    const float* const v = cache_.v + t * cache_.head_dim;
    tokens.weights.push_back(weight);
    for (size_t d = 0; d < dim; ++d) tokens.values.push_back(weight * double{v[d]});
  }
  return static_cast<double>(Prefix(head, tokens, bound)) /
         static_cast<double>(CpuTokens(segments_));
}

double GroupAttention::ScoreBudget(int64_t g, int32_t level, double share) const {
  if (CpuTokens(segments_) == 0) return 0;
  const int64_t unit = LevelTokens(level);
  const Units units = Blocks(Of(g), level, Order(g, level));
  const double whole = std::exp(Of(g).whole.lse - Of(g).largest);
  double held = Of(g).resident;
  size_t count = 0;
  while (count < units.weights.size() && held < share * whole) held += units.weights[count++];
  return std::min(1.0, static_cast<double>(static_cast<int64_t>(count) * unit) /
                           static_cast<double>(CpuTokens(segments_)));
}

std::vector<GroupAttention::Kept> GroupAttention::KeepScores(int64_t g,
                                                             const std::vector<double>& shares,
                                                             bool beside) const {
  const Head& head = Of(g);
  const std::vector<int32_t> order = beside ? TokenOrder(head, segments_.sink, segments_.local)
                                            : TokenOrder(head, 0, segments_.end);
  const double whole = std::exp(head.whole.lse - head.largest);
  double held = beside ? head.resident : 0;
  std::vector<double> sum = head.resident_sum;
  if (!beside) std::fill(sum.begin(), sum.end(), 0.0);
  std::vector<Kept> out;
  size_t count = 0;
  for (const double share : shares) {
    for (; count < order.size() && held < share * whole; ++count) {
      const double weight = Weight(head, order[count]);
      const float* const v = cache_.v + order[count] * cache_.head_dim;
      held += weight;
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * double{v[d]};
    }
    double error = 0;
    for (size_t d = 0; d < sum.size(); ++d) error += std::pow(sum[d] / held - head.whole.o[d], 2);
    out.push_back({static_cast<int64_t>(count), std::sqrt(error)});
  }
  return out;
}

GroupAttention::Outcome GroupAttention::Select(int32_t level,
                                               const std::vector<int64_t>& blocks) const {
  std::vector<int32_t> selected;
  for (int64_t g = 0; g < group_; ++g) {
    if (blocks[static_cast<size_t>(g)] == 0) continue;
    const std::vector<int32_t> order = Order(g, level);
    selected.insert(selected.end(), order.begin(), order.begin() + blocks[static_cast<size_t>(g)]);
  }
  std::sort(selected.begin(), selected.end());
  selected.erase(std::unique(selected.begin(), selected.end()), selected.end());
  Outcome outcome;
  const int64_t unit = LevelTokens(level);
  for (const int32_t block : selected) {
    outcome.tokens += unit - std::max<int64_t>(0, segments_.sink - block * unit);
  }
  for (int64_t g = 0; g < group_; ++g) {
    const Units units = Blocks(Of(g), level, selected);
    double weight = Of(g).resident, error = 0;
    for (const double w : units.weights) weight += w;
    const auto dim = static_cast<size_t>(cache_.head_dim);
    for (size_t d = 0; d < dim; ++d) {
      double sum = Of(g).resident_sum[d];
      for (size_t i = 0; i < selected.size(); ++i) sum += units.values[i * dim + d];
      outcome.outputs.push_back(sum / weight);
      error += std::pow(outcome.outputs.back() - Of(g).whole.o[d], 2);
    }
    outcome.errors.push_back(std::sqrt(error));
  }
  return outcome;
}

}  // namespace sluice
