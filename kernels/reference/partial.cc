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

// Returns scale * (q projection) . partial[t] of one query head, for every t before the row.
std::vector<double> HeadScores(const PartialScoresParams& p, int64_t r, int64_t head) {
  const int64_t rank = p.partial.dim, dim = p.head_dim;
  const int64_t kv_head = head / (p.heads / p.partial.kv_heads);
  const float* q = p.q + r * p.q_stride + head * dim;
  std::vector<double> projected(static_cast<size_t>(rank), 0.0);
  for (int64_t j = 0; j < rank; ++j) {
    for (int64_t d = 0; d < dim; ++d) {
      projected[static_cast<size_t>(j)] +=
          double{q[d]} * double{p.projection[(kv_head * dim + d) * rank + j]};
    }
  }
  std::vector<double> scores;
  for (int64_t t = 0; t < p.positions[r]; ++t) {
    const void* partial = RowOf(p.partial, p.slots[r], t, kv_head);
    double dot = 0;
    for (int64_t j = 0; j < rank; ++j) {
      dot += projected[static_cast<size_t>(j)] * Get(partial, p.partial.type, j);
    }
    scores.push_back(dot * double{p.scale});
  }
  return scores;
}

// Computes softmax(scores), in place.
void Softmax(std::vector<double>& scores) {
  if (scores.empty()) return;
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - largest);
  for (double& score : scores) score /= sum;
}

}  // namespace

void PartialKeys(const PartialKeysParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t rank = p.partial.dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const int64_t first = p.first_positions != nullptr ? p.first_positions[r] : p.positions[r];
    for (int64_t t = first; t <= p.positions[r]; ++t) {
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        const int64_t key = KeyIndex(c, p.slots[r], t, h);
        void* out = RowOf(p.partial, p.slots[r], t, h);
        for (int64_t j = 0; j < rank; ++j) {
          double sum = 0;
          for (int64_t d = 0; d < c.head_dim; ++d) {
            sum += Get(c.base, c.type, key + d) *
                   double{p.projection[(h * c.head_dim + d) * rank + j]};
          }
          Put(out, p.partial.type, j, sum);
        }
      }
    }
  }
}

void PartialScores(const PartialScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.partial.kv_heads;
  const int64_t group = p.heads / kv_heads;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / kv_heads;
    if (p.slots[r] < 0) continue;
    const bool largest = p.reduction == GroupReduction::kMax;
    std::vector<double> reduced(static_cast<size_t>(p.positions[r]),
                                largest ? -std::numeric_limits<double>::infinity() : 0.0);
    for (int64_t i = 0; i < group; ++i) {
      std::vector<double> scores = HeadScores(p, r, list % kv_heads * group + i);
      if (p.reduction == GroupReduction::kSoftmaxSum) Softmax(scores);
      for (size_t t = 0; t < reduced.size(); ++t) {
        reduced[t] = largest ? std::max(reduced[t], scores[t]) : reduced[t] + scores[t];
      }
    }
    const double divisor = p.reduction == GroupReduction::kMean ? static_cast<double>(group) : 1.0;
    for (size_t t = 0; t < reduced.size(); ++t) {
      p.scores[list * p.score_stride + static_cast<int64_t>(t)] =
          static_cast<float>(reduced[t] / divisor);
    }
    p.scores[list * p.score_stride + p.positions[r]] = kNegativeInfinity;
  }
}

}  // namespace sluice::kernels::reference
