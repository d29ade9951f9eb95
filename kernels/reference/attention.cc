#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {

void Attention(const AttentionParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim;
  const int64_t group = p.heads / c.kv_heads;
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / p.heads, h = item % p.heads;
    const int64_t slot = p.slots[r];
    const int64_t tokens = slot < 0 ? 0 : int64_t{p.positions[r]} + 1;
    std::vector<double> score(static_cast<size_t>(tokens));
    double largest = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t key = KeyIndex(c, slot, t, h / group);
      double dot = 0;
      for (int64_t i = 0; i < dim; ++i) {
        dot += double{p.q[r * p.q_stride + h * dim + i]} * Get(c.base, c.type, key + i);
      }
      score[static_cast<size_t>(t)] = dot * double{p.scale};
      largest = std::max(largest, score[static_cast<size_t>(t)]);
    }
    double sum = 0;
    std::vector<double> o(static_cast<size_t>(dim), 0.0);
    for (int64_t t = 0; t < tokens; ++t) {
      const double weight = std::exp(score[static_cast<size_t>(t)] - largest);
      const int64_t value = KeyIndex(c, slot, t, h / group) + int64_t{c.block_tokens} * dim;
      sum += weight;
      for (int64_t i = 0; i < dim; ++i) {
        o[static_cast<size_t>(i)] += weight * Get(c.base, c.type, value + i);
      }
    }
    for (int64_t i = 0; i < dim; ++i) {
      const double value = tokens == 0 ? 0.0 : o[static_cast<size_t>(i)] / sum;
      Put(p.out, p.out_type, (r * p.heads + h) * dim + i, value);
    }
    if (p.lse != nullptr) {
      p.lse[r * p.heads + h] =
          tokens == 0 ? kNegativeInfinity : static_cast<float>(largest + std::log(sum));
    }
  }
}

// Attention() above never leaves anything in `partial`.
void AttentionMerge(const AttentionParams&, Worker) {}

void Merge(const MergeParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  const int64_t all = int64_t{p.rows} * p.heads;
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    double largest = -std::numeric_limits<double>::infinity();
    for (int64_t part = 0; part < p.parts; ++part) {
      largest = std::max(largest, double{p.lse[part * all + item]});
    }
    double sum = 0;
    std::vector<double> o(static_cast<size_t>(p.head_dim), 0.0);
    for (int64_t part = 0; part < p.parts; ++part) {
      const double lse = p.lse[part * all + item];
      if (lse == -std::numeric_limits<double>::infinity()) continue;
      const double weight = std::exp(lse - largest);
      sum += weight;
      for (int64_t i = 0; i < p.head_dim; ++i) {
        o[static_cast<size_t>(i)] += weight * double{p.o[(part * all + item) * p.head_dim + i]};
      }
    }
    for (int64_t i = 0; i < p.head_dim; ++i) {
      Put(p.out, p.out_type, item * p.head_dim + i,
          sum == 0 ? 0.0 : o[static_cast<size_t>(i)] / sum);
    }
    if (p.out_lse != nullptr) {
      p.out_lse[item] = sum == 0 ? kNegativeInfinity : static_cast<float>(largest + std::log(sum));
    }
  }
}

}  // namespace sluice::kernels::reference
