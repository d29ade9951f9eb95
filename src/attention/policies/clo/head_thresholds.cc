#include "src/attention/policies/clo/head_thresholds.h"

#include <algorithm>
#include <cmath>

namespace sluice {
namespace {

constexpr int kGatePower = 3;             // p of equation 8
constexpr double kSimilarityError = 0.1;  // epsilon of equation 11
constexpr float kPredictable = 0.9f;

}  // namespace

float ThresholdOf(double gate, double eta) {
  const double lambda = std::pow(std::clamp(gate, 0.0, 1.0), kGatePower);
  return static_cast<float>(std::cos(lambda * std::acos(eta) + (1 - lambda) * M_PI));
}

float DifficultyOf(double threshold, double similarity) {
  return static_cast<float>(threshold - (similarity - kSimilarityError));
}

HeadRules RulesOf(const std::vector<float>& gates, const std::vector<float>& similarities,
                  double eta) {
  HeadRules rules;
  if (similarities.empty()) return rules;
  const auto group = std::ssize(gates) / std::ssize(similarities);
  auto of_head = gates.begin();
  for (const float similarity : similarities) {
    const float gate = *std::max_element(of_head, of_head + group);
    of_head += group;
    rules.thresholds.push_back(ThresholdOf(double{gate}, eta));
    rules.difficulty.push_back(DifficultyOf(double{rules.thresholds.back()}, double{similarity}));
  }
  return rules;
}

double PrefetchableHeads(double layer_seconds, double link_rate, double refill_bytes) {
  return layer_seconds * link_rate / refill_bytes;
}

bool IsUnpredictable(const std::vector<float>& predicted, int64_t layer) {
  return !predicted.empty() && predicted[static_cast<size_t>(layer)] < kPredictable;
}

std::vector<int64_t> PersistenceOrder(int64_t layers, int64_t kv_heads, const HeadLoads& loads,
                                      double prefetchable) {
  const int64_t heads = layers * kv_heads;
  const auto of = [](const std::vector<float>& values, int64_t head, float alike) {
    return values.empty() ? alike : values[static_cast<size_t>(head)];
  };
  std::vector<int64_t> order;
  std::vector<uint8_t> taken(static_cast<size_t>(heads));
  std::vector<double> misses(static_cast<size_t>(layers));  // of the other heads together
  for (int64_t head = 0; head < heads; ++head) {
    misses[static_cast<size_t>(head / kv_heads)] += double{of(loads.misses, head, 1)};
  }
  const auto take = [&](int64_t head) {
    order.push_back(head);
    taken[static_cast<size_t>(head)] = 1;
  };
  std::vector<int64_t> whole = {0};
  for (int64_t layer = 1; layer < layers; ++layer) {
    if (IsUnpredictable(loads.predicted, layer)) whole.push_back(layer);
  }
  std::stable_sort(whole.begin() + 1, whole.end(), [&](int64_t a, int64_t b) {
    return loads.predicted[static_cast<size_t>(a)] < loads.predicted[static_cast<size_t>(b)];
  });
  for (const int64_t layer : whole) {
    for (int64_t head = 0; head < kv_heads; ++head) take(layer * kv_heads + head);
    misses[static_cast<size_t>(layer)] = -1;
  }
  for (;;) {
    const auto most = std::ranges::max_element(misses);
    if (*most < 0 || (prefetchable > 0 && *most <= prefetchable)) return order;
    const int64_t first = (most - misses.begin()) * kv_heads;
    int64_t hardest = -1;
    for (int64_t head = first; head < first + kv_heads; ++head) {
      if (taken[static_cast<size_t>(head)] != 0) continue;
      if (hardest < 0 || of(loads.difficulty, head, 0) > of(loads.difficulty, hardest, 0)) {
        hardest = head;
      }
    }
    if (hardest < 0) {
      *most = -1;  // all of the layer's heads are taken
      continue;
    }
    take(hardest);
    *most = std::max(*most - double{of(loads.misses, hardest, 1)}, 0.0);
  }
}

std::vector<uint8_t> PersistentHeads(int64_t layers, int64_t kv_heads, const HeadLoads& loads,
                                     double share, double prefetchable) {
  const int64_t heads = layers * kv_heads;
  const int64_t count = std::llround(share * static_cast<double>(heads));
  if (count == 0) return {};
  std::vector<uint8_t> persistent(static_cast<size_t>(heads));
  const std::vector<int64_t> order = PersistenceOrder(layers, kv_heads, loads, prefetchable);
  for (int64_t i = 0; i < std::min(count, std::ssize(order)); ++i) {
    persistent[static_cast<size_t>(order[static_cast<size_t>(i)])] = 1;
  }
  return persistent;
}

}  // namespace sluice
