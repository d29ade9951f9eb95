// Statistics of anchors for any path (`S`: see simd_math.h). Products and weights of tokens are
// float32; everything that is added over units, and the walk over prefixes, is float64.
#pragma once

#include "kernels/anchor_scratch.h"
#include "kernels/cpu/simd_scores.h"
#include "kernels/fp8.h"

namespace sluice::kernels::cpu {
namespace {

inline double LengthOf(const double* x, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
  return __builtin_sqrt(sum);
}

// The row's keys and values of one KV head, whose elements are of type `T`.
template <typename T>
struct AnchorRows {
  const PagedCache& cache;
  int64_t slot, head;

  const T* Key(int64_t token) const {
    return static_cast<const T*>(cache.base) + KeyIndex(cache, slot, token, head);
  }
  const T* Value(int64_t token) const {
    return Key(token) + int64_t{cache.block_tokens} * cache.head_dim;
  }
};

// Computes the statistics of a KV head.
template <class S, typename T>
void MeasureKvHead(const AnchorStatisticsParams& p, int64_t row, int64_t head) {
  const int64_t dim = p.cache.head_dim, slot = p.slots[row];
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const AnchorRows<T> rows{p.cache, slot, head};
  float* const out = p.anchors.kv + (slot * p.cache.kv_heads + head) * (kAnchorKvNumbers + dim);
  alignas(64) float element[kMaxHeadDim], lengths[kAnchorSplitTokens];
  double mean[kMaxHeadDim];
  for (int i = 0; i < 2; ++i) {
    for (int64_t d = 0; d < dim; ++d) mean[d] = 0;
    double of_sink = 0;
    AnchorSums of_cpu;
    int64_t held = 0;
    for (int64_t t = 0; t < segments.local; ++t) {
      const T* const from = i == 0 ? rows.Key(t) : rows.Value(t);
      for (int64_t d = 0; d < dim; d += S::kWidth) S::Store(element + d, LoadElements<S>(from + d));
      float square;
      DotHeads<S, 1>(element, dim, element, dim, &square, 1);
      const float length = __builtin_sqrtf(square);
      if (t < segments.sink) {
        of_sink += double{length};
        continue;
      }
      for (int64_t d = 0; d < dim; ++d) mean[d] += double{element[d]};
      lengths[held++] = length;
      if (held < kAnchorSplitTokens && t + 1 < segments.local) continue;
      of_cpu.Add(lengths, held);
      held = 0;
    }
    const auto count = static_cast<double>(Max(CpuTokens(segments), 1));
    for (int64_t d = 0; d < dim; ++d) mean[d] /= count;
    out[i] = static_cast<float>(of_sink / segments.sink);
    out[2 + i] = static_cast<float>(LengthOf(mean, dim));
    of_cpu.Put(1, out + 4 + 4 * i);
    if (i > 0) continue;
    for (int64_t d = 0; d < dim; ++d) out[kAnchorKvNumbers + d] = static_cast<float>(mean[d]);
  }
}

// Computes peak, weight and values of a unit of `count` tokens from their products q k.
template <class S, typename T>
void MeasureUnit(const float* dots, int64_t count, float scale, const T* values, int64_t dim,
                 float* peak, float* weight, float* out) {
  alignas(64) float w[kAnchorUnitTokens];
  float largest = kNegativeInfinity;
  for (int64_t t = 0; t < kAnchorUnitTokens; ++t) {
    w[t] = t < count ? dots[t] * scale : kNegativeInfinity;
    largest = w[t] > largest ? w[t] : largest;
  }
  for (int64_t t = 0; t < kAnchorUnitTokens; t += S::kWidth) {
    S::Store(w + t, Exp<S>(S::Sub(S::Load(w + t), S::Set1(largest))));
  }
  *peak = largest;
  *weight = 0;
  for (int64_t t = 0; t < count; ++t) *weight += w[t];
  for (int64_t d = 0; d < dim; d += S::kWidth) {
    typename S::F sum = S::Set1(0.0f);
    for (int64_t t = 0; t < count; ++t) {
      sum = S::Fma(S::Set1(w[t]), LoadElements<S>(values + t * dim + d), sum);
    }
    S::Store(out + d, sum);
  }
}

// Computes the units of `heads` <= kScoreHeads query heads of a KV head, and the moments of their
// z.
template <class S, typename T>
void MeasureUnits(const AnchorStatisticsParams& p, int64_t row, int64_t first, int64_t heads,
                  const AnchorArrays& arrays) {
  const int64_t dim = arrays.dim, slot = p.slots[row];
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const AnchorRows<T> rows{p.cache, slot, first / (p.heads / p.cache.kv_heads)};
  const float* const q = p.q + row * p.q_stride + first * dim;
  alignas(64) float dots[kScoreHeads][kAnchorSplitTokens];
  AnchorSums z[kScoreHeads];
  for (int64_t begin = 0; begin < segments.end; begin += kAnchorSplitTokens) {
    const int64_t end = Min(begin + kAnchorSplitTokens, segments.end);
    for (int64_t t = begin; t < end; ++t) {
      DotRow<S>(q, heads, dim, rows.Key(t), dim, dots[0] + (t - begin), kAnchorSplitTokens);
    }
    const int64_t from = Max(begin, segments.sink), to = Min(end, segments.local);
    for (int64_t h = 0; h < heads; ++h) {
      if (from < to) z[h].Add(dots[h] + (from - begin), to - from);
      for (int64_t t = begin; t < end; t += kAnchorUnitTokens) {
        const int64_t unit = t / kAnchorUnitTokens, head = first + h;
        MeasureUnit<S>(dots[h] + (t - begin), Min(kAnchorUnitTokens, end - t), p.scale,
                       rows.Value(t), dim, arrays.Peaks(head) + unit, arrays.Weights(head) + unit,
                       arrays.Values(head, unit));
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    double square = 0;
    for (int64_t d = 0; d < dim; ++d) square += double{q[h * dim + d]} * double{q[h * dim + d]};
    float* const out = p.anchors.heads + (slot * p.heads + first + h) * (kAnchorHeadNumbers + dim);
    const double length = __builtin_sqrt(square * static_cast<double>(dim));
    z[h].Put(length > 0 ? 1 / length : 0, out);
    out[10] = static_cast<float>(__builtin_sqrt(square));
    for (int64_t d = 0; d < dim; ++d) out[kAnchorHeadNumbers + d] = q[h * dim + d];
  }
}

// The sums of some tokens' weights and weighted values, relative to the score `largest`.
struct AnchorPart {
  double largest = static_cast<double>(kNegativeInfinity);
  double weight = 0;
  double values[kMaxHeadDim] = {};

  // Adds numbers that are relative to the score `peak`.
  template <typename T>
  void Add(double peak, double more, const T* of, int64_t dim) {
    const double factor = __builtin_exp(peak - largest);
    weight += factor * more;
    for (int64_t d = 0; d < dim; ++d) values[d] += factor * static_cast<double>(of[d]);
  }
  void Add(const AnchorPart& other, int64_t dim) {
    if (other.weight > 0) Add(other.largest, other.weight, other.values, dim);
  }
  void Output(int64_t dim, double* o) const {
    for (int64_t d = 0; d < dim; ++d) o[d] = weight > 0 ? values[d] / weight : 0;
  }
};

// Adds the units of tokens [begin, end) of a head.
inline void AddUnits(const AnchorArrays& arrays, int64_t head, int64_t begin, int64_t end,
                     AnchorPart& part) {
  for (int64_t t = begin; t < end; t += kAnchorUnitTokens) {
    const int64_t u = t / kAnchorUnitTokens;
    part.Add(double{arrays.Peaks(head)[u]}, double{arrays.Weights(head)[u]}, arrays.Values(head, u),
             arrays.dim);
  }
}

// Computes a head's attention to the three segments, and its output over all tokens.
inline void MeasureOutputs(const AnchorStatisticsParams& p, int64_t row, int64_t head,
                           const AnchorArrays& arrays) {
  const int64_t dim = arrays.dim;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const int64_t bounds[4] = {0, segments.sink, segments.local, segments.end};
  float* const out = p.anchors.heads + (p.slots[row] * p.heads + head) * (kAnchorHeadNumbers + dim);
  AnchorPart parts[3], resident, whole;
  double o[kMaxHeadDim];
  for (int i = 0; i < 3; ++i) {
    for (int64_t t = bounds[i]; t < bounds[i + 1]; t += kAnchorUnitTokens) {
      const double peak = double{arrays.Peaks(head)[t / kAnchorUnitTokens]};
      parts[i].largest = peak > parts[i].largest ? peak : parts[i].largest;
    }
    AnchorPart& part = parts[i];
    AddUnits(arrays, head, bounds[i], bounds[i + 1], part);
    part.Output(dim, o);
    out[4 + i] = static_cast<float>(part.largest + __builtin_log(part.weight));
    out[7 + i] = static_cast<float>(LengthOf(o, dim));
    whole.largest = part.largest > whole.largest ? part.largest : whole.largest;
    const bool is_cpu = i == 1;
    if (!is_cpu && part.largest > resident.largest) resident.largest = part.largest;
  }
  for (int i : {0, 2}) resident.Add(parts[i], dim);
  for (const AnchorPart& part : parts) whole.Add(part, dim);
  resident.Output(dim, o);
  const double of_resident = LengthOf(o, dim);
  whole.Output(dim, arrays.O(head));
  arrays.Output(head) = {whole.largest, LengthOf(arrays.O(head), dim), of_resident, 0};
}

// Returns the score of a block. It is rounded to float32, as the scores of LevelScores are.
inline float AnchorScore(const float* q, const LevelDigests& digests, const DigestRows& rows,
                         int64_t slot, int64_t kv_head, int64_t dim) {
  static constexpr E4M3Values kValues = MakeE4M3Values();
  const PagedRows& of_level = digests.of[rows.level];
  const bool has_spread = HasSpread(of_level, static_cast<int32_t>(dim));
  double best = double{kNegativeInfinity};
  for (int64_t b = rows.begin; b < rows.end; ++b) {
    const auto* pieces =
        static_cast<const uint8_t*>(of_level.base) + RowOffset(of_level, slot, b, kv_head);
    double of_row = double{kNegativeInfinity}, spreads[4] = {};
    for (int64_t piece = 0; piece < kDigestPieces; ++piece, pieces += dim) {
      double sums[4] = {};
      for (int64_t d = 0; d < dim; ++d) sums[d % 4] += double{q[d]} * kValues.of[pieces[d]];
      const double score = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      of_row = score > of_row ? score : of_row;
    }
    for (int64_t d = 0; has_spread && d < dim; ++d) {
      spreads[d % 4] += double{q[d]} * double{q[d]} * kValues.of[pieces[d]];
    }
    const double spread = (spreads[0] + spreads[1]) + (spreads[2] + spreads[3]);
    of_row += double{kFluxionDeviations} * __builtin_sqrt(spread > 0 ? spread : 0);
    best = of_row > best ? of_row : best;
  }
  return static_cast<float>(best);
}

// Returns an integer that is less for a larger score, and for a lower block among equals.
inline uint64_t AnchorKey(float score, int64_t block) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);  // both zeros are equal
  const uint32_t rising = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{~rising} << 32 | static_cast<uint64_t>(block);
}

// Puts key `i` of [0, end) in its place in a heap whose top is the largest.
inline void SinkKey(uint64_t* keys, int64_t i, int64_t end) {
  const uint64_t key = keys[i];
  for (int64_t child = 2 * i + 1; child < end; child = 2 * i + 1) {
    if (child + 1 < end && keys[child] < keys[child + 1]) ++child;
    if (keys[child] <= key) break;
    keys[i] = keys[child];
    i = child;
  }
  keys[i] = key;
}

inline void SortKeys(uint64_t* keys, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; --i) SinkKey(keys, i, count);
  for (int64_t end = count - 1; end > 0; --end) {
    const uint64_t largest = keys[0];
    keys[0] = keys[end];
    keys[end] = largest;
    SinkKey(keys, 0, end);
  }
}

// Returns how many blocks of the order are in the shortest prefix from which on every longer one
// has an error of at most `limit`. The prefix of all blocks has none. `prefix` is the default set.
inline int64_t AnchorPrefix(const AnchorArrays& arrays, int64_t head, int32_t level,
                            const uint64_t* order, int64_t blocks, int64_t first_unit, double limit,
                            AnchorPart& prefix) {
  const int64_t dim = arrays.dim;
  const double* const o = arrays.O(head);
  int64_t wanted = 0;
  for (int64_t n = 0; n < blocks; ++n) {
    double errors[4] = {};
    for (int64_t d = 0; d < dim; ++d) {
      const double off = prefix.values[d] / prefix.weight - o[d];
      errors[d % 4] += off * off;
    }
    const double error = __builtin_sqrt((errors[0] + errors[1]) + (errors[2] + errors[3]));
    if (!(error <= limit)) wanted = n + 1;
    const int64_t unit = static_cast<int64_t>(order[n] & 0xFFFFFFFFu) << level;
    const int64_t end = unit + (int64_t{1} << level);
    AddUnits(arrays, head, Max(unit, first_unit) * kAnchorUnitTokens, end * kAnchorUnitTokens,
             prefix);
  }
  return wanted;
}

// Finds the budgets of a head.
inline void FindBudgets(const AnchorStatisticsParams& p, int64_t row, int64_t head, double limit,
                        const AnchorArrays& arrays) {
  const int64_t dim = arrays.dim, slot = p.slots[row],
                kv_head = head / (p.heads / p.cache.kv_heads);
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const float* const q = p.q + row * p.q_stride + head * dim;
  float* const out = p.anchors.heads + (slot * p.heads + head) * (kAnchorHeadNumbers + dim) + 11;
  AnchorPart of_default;
  of_default.largest = arrays.Output(head).largest;
  AddUnits(arrays, head, 0, segments.sink, of_default);
  AddUnits(arrays, head, segments.local, segments.end, of_default);
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    const int64_t first = FirstBlock(segments, level), blocks = CpuBlocks(segments, level);
    uint64_t* const order = arrays.Order(head) + AnchorBlocksBefore(arrays.layout.units, level);
    for (int64_t b = first; b < first + blocks; ++b) {
      const DigestRows rows = RowsOfBlock(p.digests, segments, level, static_cast<int32_t>(b));
      order[b - first] = AnchorKey(AnchorScore(q, p.digests, rows, slot, kv_head, dim), b);
    }
    SortKeys(order, blocks);
    AnchorPart prefix = of_default;
    const int64_t wanted = AnchorPrefix(arrays, head, level, order, blocks,
                                        segments.sink / kAnchorUnitTokens, limit, prefix);
    const auto tokens = static_cast<double>(wanted * LevelTokens(level));
    const double share = wanted == 0 ? 0 : tokens / CpuTokens(segments);
    out[level] = static_cast<float>(share < 1 ? share : 1);
  }
}

template <class S, typename T>
void MeasureRow(const AnchorStatisticsParams& p, int64_t row) {
  const AnchorArrays arrays(p, int64_t{p.positions[row]} + 1);
  const int64_t group = p.heads / p.cache.kv_heads;
  double largest = 0, resident = 0;
  for (int64_t first = 0; first < p.heads; first += group) {
    for (int64_t h = 0; h < group; h += kScoreHeads) {
      MeasureUnits<S, T>(p, row, first + h, Min(kScoreHeads, group - h), arrays);
    }
  }
  for (int64_t h = 0; h < p.heads; ++h) {
    MeasureOutputs(p, row, h, arrays);
    const AnchorOutput& output = arrays.Output(h);
    largest = output.length > largest ? output.length : largest;
    resident = output.resident > resident ? output.resident : resident;
  }
  for (int64_t h = 0; h < p.heads; ++h) {
    FindBudgets(p, row, h, double{p.tau} * largest, arrays);
  }
  p.anchors.resident[p.slots[row]] = static_cast<float>(resident);
}

// Budgets need the outputs of all query heads, workers do not wait for each other, and rows share
// the scratch. So one worker computes what belongs to query heads; KV heads are split over all.
template <class S, typename T>
void MeasureAnchors(const AnchorStatisticsParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.cache.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t row = list / p.cache.kv_heads;
    if (p.slots[row] >= 0) MeasureKvHead<S, T>(p, row, list % p.cache.kv_heads);
  }
  if (worker.index != 0) return;
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] >= 0) MeasureRow<S, T>(p, r);
  }
}

template <class S>
void AnchorStatistics(const AnchorStatisticsParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const bool valid = c.head_dim % 16 == 0 && c.head_dim <= kMaxHeadDim &&
                     p.heads % c.kv_heads == 0 && c.block_tokens % kAnchorUnitTokens == 0 &&
                     c.ring_blocks == 0 && c.head_tables == nullptr &&
                     AreDigests(p.digests, c.head_dim);
  if (!valid) {
    KernelCheckFailed(
        "anchor_statistics: head_dim a multiple of 16 up to 256, blocks of a multiple of 16 "
        "tokens, no ring, digests in e4m3, a spread at level 0 alone");
  }
  if (c.type == DType::kFloat32) {
    MeasureAnchors<S, float>(p, worker);
  } else {
    MeasureAnchors<S, uint16_t>(p, worker);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
