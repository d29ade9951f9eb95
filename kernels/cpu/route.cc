// Route for every path: the few hundred experts of a row are compared one by one.
#include <cmath>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int32_t kMaxExperts = 1024;

// Marks the `count` largest of values[0, size), lower indices first among equals.
void MarkLargest(const float* values, int64_t size, int64_t count, bool* marked) {
  for (int64_t i = 0; i < size; ++i) marked[i] = false;
  for (; count > 0; --count) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; ++i) {
      if (!marked[i] && (best < 0 || values[i] > values[best])) best = i;
    }
    marked[best] = true;
  }
}

void RouteRow(const RouteParams& p, int64_t r) {
  const float* logits = p.logits + r * p.experts;
  int32_t* chosen = p.chosen + r * p.k;
  float* weights = p.weights + r * p.k;
  bool valid = p.slots[r] >= 0;
  for (int64_t e = 0; e < p.experts; ++e) valid &= !__builtin_isnan(logits[e]);
  if (!valid) {
    for (int64_t j = 0; j < p.k; ++j) {
      chosen[j] = -1;
      weights[j] = 0;
    }
    return;
  }
  float s[kMaxExperts], choice[kMaxExperts], of_groups[kMaxExperts];
  bool marked[kMaxExperts];
  const int64_t of_group = p.experts / p.groups;
  for (int64_t e = 0; e < p.experts; ++e) {
    s[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    choice[e] = p.bias != nullptr ? s[e] + p.bias[e] : s[e];
  }
  for (int64_t g = 0; g < p.groups; ++g) {
    float first = kNegativeInfinity, second = kNegativeInfinity;
    for (int64_t e = g * of_group; e < (g + 1) * of_group; ++e) {
      if (choice[e] > first) {
        second = first;
        first = choice[e];
      } else if (choice[e] > second) {
        second = choice[e];
      }
    }
    of_groups[g] = of_group > 1 ? first + second : first;
  }
  MarkLargest(of_groups, p.groups, p.top_groups, marked);
  for (int64_t e = 0; e < p.experts; ++e) {
    if (!marked[e / of_group]) choice[e] = kNegativeInfinity;
  }
  MarkLargest(choice, p.experts, p.k, marked);
  float sum = 0;
  int64_t j = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    if (!marked[e]) continue;
    chosen[j++] = e;
    sum += s[e];
  }
  sum += 1e-20f;
  for (j = 0; j < p.k; ++j) {
    const float weight = p.normalise ? s[chosen[j]] / sum : s[chosen[j]];
    weights[j] = weight * p.scaling;
  }
}

}  // namespace

void Route(const RouteParams& p, Worker worker) {
  if (p.experts > kMaxExperts || p.k > p.experts / p.groups * p.top_groups) {
    KernelCheckFailed("route: up to 1024 experts, k at most those of top_groups groups");
  }
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) RouteRow(p, r);
}

// This is a counting sort, and little enough for one worker.
void RoutePairs(const RouteParams& p, Worker worker) {
  if (worker.index != 0) return;
  const int64_t pairs = int64_t{p.rows} * p.k;
  int32_t* next = p.begins + 1;  // where each expert's next pair goes
  for (int64_t e = 0; e <= p.experts; ++e) p.begins[e] = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    if (p.chosen[i] >= 0 && p.chosen[i] + 1 < p.experts) ++next[p.chosen[i] + 1];
  }
  for (int64_t e = 1; e < p.experts; ++e) next[e] += next[e - 1];
  for (int64_t i = 0; i < pairs; ++i) {
    if (p.chosen[i] >= 0) p.pairs[next[p.chosen[i]]++] = static_cast<int32_t>(i);
  }
}

}  // namespace sluice::kernels::cpu
