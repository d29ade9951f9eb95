#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

void* RowOf(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return static_cast<char*>(rows.base) + RowOffset(rows, slot, row, head);
}

// Writes the code of x(0), ..., x(dim - 1).
template <typename Element>
void PutCode(const Element& x, int64_t dim, const float* hash, int64_t words, int32_t* code) {
  for (int64_t w = 0; w < words; ++w) {
    uint32_t word = 0;
    for (int64_t b = 0; b < 32; ++b) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += x(d) * double{hash[(d * words + w) * 32 + b]};
      if (sum > 0) word |= uint32_t{1} << b;
    }
    code[w] = static_cast<int32_t>(word);
  }
}

int64_t Differing(const int32_t* a, const int32_t* b, int64_t words) {
  int64_t bits = 0;
  for (int64_t w = 0; w < words; ++w) {
    for (uint32_t x = static_cast<uint32_t>(a[w] ^ b[w]); x != 0; x >>= 1) bits += x & 1;
  }
  return bits;
}

// Returns the cosine of two vectors, or NaN where it has none.
double Cosine(const float* a, const float* b, int64_t dim) {
  double product = 0, aa = 0, bb = 0;
  for (int64_t d = 0; d < dim; ++d) {
    product += double{a[d]} * double{b[d]};
    aa += double{a[d]} * double{a[d]};
    bb += double{b[d]} * double{b[d]};
  }
  return product / (std::sqrt(aa) * std::sqrt(bb));
}

// Returns the similarity of a group, or NaN where a head has none.
double GroupSimilarity(const LabelLookupParams& p, const float* q, const float* label,
                       int64_t first, int64_t group) {
  double least = std::numeric_limits<double>::infinity(), sum = 0, weights = 0, inverse = 0;
  for (int64_t i = 0; i < group; ++i) {
    const double cosine = Cosine(q + i * p.head_dim, label + i * p.head_dim, p.head_dim);
    if (!std::isfinite(cosine)) return std::numeric_limits<double>::quiet_NaN();
    const double weight = p.importance[first + i];
    least = std::min(least, cosine);
    sum += cosine;
    weights += weight;
    if (weight > 0) {
      inverse += cosine > 0 ? weight / cosine : std::numeric_limits<double>::infinity();
    }
  }
  if (p.rule == SimilarityRule::kMin) return least;
  if (p.rule == SimilarityRule::kMean) return sum / static_cast<double>(group);
  return weights > 0 ? weights / inverse : 1.0;
}

}  // namespace

void HashKeys(const HashKeysParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t words = p.codes.dim, dim = c.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const int64_t first = p.first_positions != nullptr ? p.first_positions[r] : p.positions[r];
    for (int64_t t = first; t <= p.positions[r]; ++t) {
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        const int64_t key = KeyIndex(c, p.slots[r], t, h);
        const auto element = [&](int64_t d) { return Get(c.base, c.type, key + d); };
        PutCode(element, dim, p.hash + h * dim * words * 32, words,
                static_cast<int32_t*>(RowOf(p.codes, p.slots[r], t, h)));
        double squares = 0;
        for (int64_t d = 0; d < dim; ++d) squares += element(d) * element(d);
        Put(RowOf(p.lengths, p.slots[r], t, h), p.lengths.type, 0, std::sqrt(squares));
      }
    }
  }
}

void HashQueries(const HashQueriesParams& p, Worker worker) {
  const int64_t dim = p.head_dim, words = p.words, group = p.heads / p.kv_heads;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    for (int64_t h = 0; h < p.heads; ++h) {
      const float* q = p.q + r * p.q_stride + h * dim;
      PutCode([&](int64_t d) { return double{q[d]}; }, dim, p.hash + h / group * dim * words * 32,
              words, p.codes + (r * p.heads + h) * words);
    }
  }
}

void HashScores(const HashScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.codes.kv_heads, group = p.heads / kv_heads, words = p.codes.dim;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / kv_heads, h = list % kv_heads;
    if (p.slots[r] < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) continue;
    float* scores = p.scores + list * p.score_stride;
    for (int64_t t = 0; t < p.positions[r]; ++t) {
      const auto* code = static_cast<const int32_t*>(RowOf(p.codes, p.slots[r], t, h));
      int64_t differing = 0;
      for (int64_t i = 0; i < group; ++i) {
        differing += Differing(code, p.q_codes + (r * p.heads + h * group + i) * words, words);
      }
      const auto factor = static_cast<double>(group * words * 32 - 2 * differing);
      scores[t] =
          static_cast<float>(factor * Get(RowOf(p.lengths, p.slots[r], t, h), p.lengths.type, 0));
    }
    scores[p.positions[r]] = kNegativeInfinity;
  }
}

void LabelLookup(const LabelLookupParams& p, Worker worker) {
  const int64_t group = p.heads / p.kv_heads, of_group = group * p.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t slot = p.slots[r];
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const int64_t list = r * p.kv_heads + h;
      p.missed[list] = slot < 0 ? 0 : p.others;
      if (slot < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) continue;
      const float* q = p.q + r * p.q_stride + h * of_group;
      float* label = p.labels + (slot * p.kv_heads + h) * of_group;
      int32_t& labelled = p.labelled[slot * p.kv_heads + h];
      const int32_t age = LabelAge(p, p.positions[r]);
      // A similarity of NaN is not at least the threshold.
      const bool hit = labelled >= 0 && labelled < p.positions[r] &&
                       (age == 0 || p.positions[r] - labelled < age) &&
                       GroupSimilarity(p, q, label, h * group, group) >= double{p.thresholds[h]};
      p.missed[list] = hit ? 0 : 1;
      if (!hit) {
        labelled = p.positions[r];
        std::copy(q, q + of_group, label);
      }
      if (p.counters != nullptr) {
        p.counters[slot].lookups += 1;
        p.counters[slot].misses += p.missed[list];
      }
    }
  }
}

}  // namespace sluice::kernels::reference
