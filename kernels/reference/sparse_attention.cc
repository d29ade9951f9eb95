#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// A token of a list: its index in the cache, and its position in the sequence.
struct ListToken {
  int64_t place;
  int64_t position;
};

template <typename Params>
std::vector<ListToken> TokensOf(const Params& p, int64_t row, int64_t head) {
  std::vector<ListToken> tokens;
  const int64_t list = row * p.cache.kv_heads + head;
  const int64_t count = std::clamp(p.counts[list], 0, p.capacity);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t unit = p.units != nullptr ? p.units[list * p.capacity + i] : i;
    const int64_t place = p.places != nullptr ? p.places[list * p.capacity + i] : unit;
    for (int64_t t = 0; t < p.unit_tokens; ++t) {
      const int64_t position = unit * p.unit_tokens + t;
      if (p.units != nullptr && position > p.positions[row]) continue;
      tokens.push_back({place * p.unit_tokens + t, position});
    }
  }
  return tokens;
}

// Returns scale * q k of a head and a token.
template <typename Params>
double Score(const Params& p, int64_t row, int64_t head, int64_t place) {
  const PagedCache& c = p.cache;
  const int64_t key = KeyIndex(c, p.slots[row], place, head / (p.heads / c.kv_heads));
  const float* q = p.q + row * p.q_stride + head * c.head_dim;
  double dot = 0;
  for (int64_t i = 0; i < c.head_dim; ++i) dot += double{q[i]} * Get(c.base, c.type, key + i);
  return dot * double{p.scale};
}

void AttendHead(const SparseAttentionParams& p, int64_t row, int64_t head,
                const std::vector<ListToken>& tokens) {
  const PagedCache& c = p.cache;
  const int64_t kv_head = head / (p.heads / c.kv_heads);
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  for (const ListToken& token : tokens) {
    scores.push_back(Score(p, row, head, token.place));
    largest = std::max(largest, scores.back());
  }
  double sum = 0;
  std::vector<double> o(static_cast<size_t>(c.head_dim), 0.0);
  for (size_t t = 0; t < tokens.size(); ++t) {
    const double weight = std::exp(scores[t] - largest);
    const int64_t value =
        KeyIndex(c, p.slots[row], tokens[t].place, kv_head) + int64_t{c.block_tokens} * c.head_dim;
    sum += weight;
    for (size_t i = 0; i < o.size(); ++i) {
      o[i] += weight * Get(c.base, c.type, value + static_cast<int64_t>(i));
    }
  }
  const int64_t out = row * p.heads + head;
  for (size_t i = 0; i < o.size(); ++i) {
    p.o[out * c.head_dim + static_cast<int64_t>(i)] =
        tokens.empty() ? 0.0f : static_cast<float>(o[i] / sum);
  }
  p.lse[out] = tokens.empty() ? kNegativeInfinity : static_cast<float>(largest + std::log(sum));
}

}  // namespace

void SparseAttention(const SparseAttentionParams& p, Worker worker) {
  const int64_t group = p.heads / p.cache.kv_heads;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    for (int64_t h = p.kv_head_begin * group; h < p.kv_head_end * group; ++h) {
      if (p.wanted != nullptr && p.wanted[r * p.cache.kv_heads + h / group] == 0) continue;
      const bool padded = p.slots[r] < 0;
      AttendHead(p, r, h, padded ? std::vector<ListToken>() : TokensOf(p, r, h / group));
    }
  }
}

void MovingAverage(const MovingAverageParams& p, Worker worker) {
  const int64_t kv_heads = p.cache.kv_heads;
  const int64_t group = p.heads / kv_heads;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / kv_heads, kv_head = list % kv_heads;
    if (p.slots[r] < 0) continue;
    for (const ListToken& token : TokensOf(p, r, kv_head)) {
      double largest = 0, sum = 0;
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const double lse = p.lse[r * p.heads + h];
        const double weight = std::exp(Score(p, r, h, token.place) - lse);
        largest = std::max(largest, weight);
        sum += weight;
      }
      const double weight =
          p.reduction == GroupReduction::kMax ? largest : sum / static_cast<double>(group);
      float& average =
          *reinterpret_cast<float*>(static_cast<char*>(p.average.base) +
                                    RowOffset(p.average, p.slots[r], token.place, kv_head));
      average = static_cast<float>(token.position == p.positions[r]
                                       ? weight
                                       : (1 - double{p.alpha}) * double{average} +
                                             double{p.alpha} * weight);
    }
  }
}

}  // namespace sluice::kernels::reference
