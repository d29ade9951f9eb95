#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// Returns the indices of the `count` largest of `values`, ascending; lower ones are first among
// equals.
std::vector<int32_t> Largest(const std::vector<double>& values, int32_t count) {
  std::vector<std::pair<double, int32_t>> order;
  for (size_t i = 0; i < values.size(); ++i) {
    order.emplace_back(-values[i], static_cast<int32_t>(i));
  }
  std::sort(order.begin(), order.end());
  std::vector<int32_t> indices;
  for (int32_t i = 0; i < count; ++i) indices.push_back(order[static_cast<size_t>(i)].second);
  std::sort(indices.begin(), indices.end());
  return indices;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void RouteRow(const RouteParams& p, int64_t r) {
  const float* logits = p.logits + r * p.experts;
  int32_t* chosen = p.chosen + r * p.k;
  float* weights = p.weights + r * p.k;
  const bool nan = std::any_of(logits, logits + p.experts, [](float v) { return std::isnan(v); });
  if (p.slots[r] < 0 || nan) {
    std::fill_n(chosen, p.k, -1);
    std::fill_n(weights, p.k, 0.0f);
    return;
  }
  const int32_t of_group = p.experts / p.groups;
  std::vector<double> choice, of_groups;
  for (int32_t e = 0; e < p.experts; ++e) {
    choice.push_back(Sigmoid(double{logits[e]}) + (p.bias != nullptr ? double{p.bias[e]} : 0.0));
  }
  for (int32_t g = 0; g < p.groups; ++g) {
    std::vector<double> group(choice.begin() + g * of_group, choice.begin() + (g + 1) * of_group);
    std::sort(group.rbegin(), group.rend());
    of_groups.push_back(group[0] + (of_group > 1 ? group[1] : 0.0));
  }
  std::vector<int32_t> experts;
  std::vector<double> values;
  for (int32_t g : Largest(of_groups, p.top_groups)) {
    for (int32_t e = g * of_group; e < (g + 1) * of_group; ++e) {
      experts.push_back(e);
      values.push_back(choice[static_cast<size_t>(e)]);
    }
  }
  double sum = 1e-20;
  const std::vector<int32_t> best = Largest(values, p.k);
  for (int32_t i : best) sum += Sigmoid(double{logits[experts[static_cast<size_t>(i)]]});
  for (int32_t j = 0; j < p.k; ++j) {
    chosen[j] = experts[static_cast<size_t>(best[static_cast<size_t>(j)])];
    const double s = Sigmoid(double{logits[chosen[j]]});
    weights[j] = static_cast<float>((p.normalise ? s / sum : s) * double{p.scaling});
  }
}

}  // namespace

void Route(const RouteParams& p, Worker worker) {
  if (p.k > p.experts / p.groups * p.top_groups) {
    KernelCheckFailed("route: k is at most the experts of top_groups groups");
  }
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) RouteRow(p, r);
}

void RoutePairs(const RouteParams& p, Worker worker) {
  if (worker.index != 0) return;
  int32_t count = 0;
  p.begins[0] = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    for (int32_t pair = 0; pair < p.rows * p.k; ++pair) {
      if (p.chosen[pair] == e) p.pairs[count++] = pair;
    }
    p.begins[e + 1] = count;
  }
}

void ExpertLinear(const ExpertLinearParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.experts} * p.n, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t e = row / p.n, j = row % p.n;
    if (p.begins[e] == p.begins[e + 1]) continue;
    const std::vector<double> w = WeightRow(p.w, row);
    for (int64_t i = p.begins[e]; i < p.begins[e + 1]; ++i) {
      const int64_t pair = p.pairs[i], from = pair / p.pairs_per_row * p.w.k;
      double sum = 0;
      for (size_t d = 0; d < w.size(); ++d) {
        sum += Get(p.x, p.x_type, from + static_cast<int64_t>(d)) * w[d];
      }
      p.y[pair * p.n + j] = static_cast<float>(sum);
    }
  }
}

void Combine(const CombineParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    for (int64_t i = 0; i < p.dim; ++i) {
      double sum = p.out[r * p.dim + i];
      for (int64_t pair = r * p.k; pair < (r + 1) * p.k; ++pair) {
        if (p.chosen[pair] >= 0) sum += double{p.weights[pair]} * double{p.y[pair * p.dim + i]};
      }
      p.out[r * p.dim + i] = static_cast<float>(sum);
    }
  }
}

void HeadLinear(const HeadLinearParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.heads} * p.n, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const int64_t h = row / p.n, j = row % p.n;
    const std::vector<double> w = WeightRow(p.w, row);
    for (int64_t r = 0; r < p.rows; ++r) {
      double sum = 0;
      for (size_t d = 0; d < w.size(); ++d) {
        const int64_t at = r * p.x_stride + h * p.x_head_stride + static_cast<int64_t>(d);
        sum += Get(p.x, p.x_type, at) * w[d];
      }
      Put(p.y, p.y_type, r * p.y_stride + h * p.y_head_stride + j, sum);
    }
  }
}

}  // namespace sluice::kernels::reference
