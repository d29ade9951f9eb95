#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

void* RowOf(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return static_cast<char*>(rows.base) + RowOffset(rows, slot, row, head);
}

// Returns the products of x(0), ..., x(dim - 1) with the columns of a hash matrix.
template <typename Element>
std::vector<double> Products(const Element& x, int64_t dim, const float* hash, int64_t bits) {
  std::vector<double> products(static_cast<size_t>(bits));
  for (int64_t b = 0; b < bits; ++b) {
    double& sum = products[static_cast<size_t>(b)];
    for (int64_t d = 0; d < dim; ++d) sum += x(d) * double{hash[d * bits + b]};
  }
  return products;
}

void SetBit(int32_t* code, size_t bit) {
  code[bit / 32] =
      static_cast<int32_t>(static_cast<uint32_t>(code[bit / 32]) | uint32_t{1} << (bit % 32));
}

bool HasBit(const int32_t* code, int64_t bit) {
  return (static_cast<uint32_t>(code[bit / 32]) >> (bit % 32) & 1) != 0;
}

// Returns the level of a column in the code of a query.
int LevelAt(const int32_t* planes, int64_t words, int64_t bit) {
  int level = 0;
  for (int i = 0; i < kHashPlanes; ++i) {
    const int value = i == kHashPlanes - 1 ? -(1 << i) : 1 << i;
    if (HasBit(planes + i * words, bit)) level += value;
  }
  return level;
}

int64_t Agreement(const int32_t* planes, const int32_t* code, int64_t words) {
  int64_t sum = 0;
  for (int64_t bit = 0; bit < words * 32; ++bit) {
    const int level = LevelAt(planes, words, bit);
    sum += HasBit(code, bit) ? level : -level;
  }
  return sum;
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

void KeyCentres(const KeyCentresParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const int64_t tokens = int64_t{p.positions[r]} + 1;
    const int64_t count = std::min<int64_t>(tokens, kCentreKeys);
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) {
          sum += Get(c.base, c.type, KeyIndex(c, p.slots[r], i * tokens / count, h) + d);
        }
        p.centres[(p.slots[r] * int64_t{c.kv_heads} + h) * c.head_dim + d] =
            static_cast<float>(sum / static_cast<double>(count));
      }
    }
  }
}

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
        const int64_t centre = (p.slots[r] * int64_t{c.kv_heads} + h) * dim;
        const auto element = [&](int64_t d) {
          return Get(c.base, c.type, key + d) -
                 (p.centres != nullptr ? double{p.centres[centre + d]} : 0.0);
        };
        const std::vector<double> products =
            Products(element, dim, p.hash + h * dim * words * 32, words * 32);
        auto* const code = static_cast<int32_t*>(RowOf(p.codes, p.slots[r], t, h));
        std::fill_n(code, words, 0);
        for (size_t bit = 0; bit < products.size(); ++bit) {
          if (products[bit] > 0) SetBit(code, bit);
        }
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
      const std::vector<double> products =
          Products([&](int64_t d) { return double{q[d]}; }, dim,
                   p.hash + h / group * dim * words * 32, words * 32);
      double largest = 0;
      for (const double x : products) largest = std::max(largest, std::abs(x));
      int32_t* const planes = p.codes + (r * p.heads + h) * kHashPlanes * words;
      std::fill_n(planes, kHashPlanes * words, 0);
      for (size_t bit = 0; bit < products.size(); ++bit) {
        const double scaled =
            p.levels == 1 ? (products[bit] > 0 ? 1.0 : -1.0) : products[bit] * (p.levels / largest);
        const int level = std::isfinite(scaled) ? static_cast<int>(std::nearbyint(scaled)) : 0;
        for (int i = 0; i < kHashPlanes; ++i) {
          if ((level >> i & 1) != 0) SetBit(planes + i * words, bit);
        }
      }
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
      int64_t sum = 0, largest = std::numeric_limits<int64_t>::min();
      for (int64_t i = 0; i < group; ++i) {
        const int64_t query = r * p.heads + h * group + i;
        const int64_t of_query = Agreement(p.q_codes + query * kHashPlanes * words, code, words);
        sum += of_query;
        largest = std::max(largest, of_query);
      }
      const auto factor = static_cast<double>(p.reduction == GroupReduction::kMax ? largest : sum);
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
