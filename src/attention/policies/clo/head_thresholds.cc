#include "src/attention/policies/clo/head_thresholds.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice {
namespace {

constexpr int kGatePower = 3;             // p of equation 8
constexpr double kSimilarityError = 0.1;  // epsilon of equation 11

}  // namespace

float ThresholdOf(double gate, double eta) {
  const double lambda = std::pow(std::clamp(gate, 0.0, 1.0), kGatePower);
  return static_cast<float>(std::cos(lambda * std::acos(eta) + (1 - lambda) * M_PI));
}

float DifficultyOf(double threshold, double similarity) {
  return static_cast<float>(threshold - (similarity - kSimilarityError));
}

std::vector<uint8_t> HardestHeads(int64_t layers, int64_t kv_heads,
                                  const std::vector<float>& difficulty, double share) {
  const int64_t heads = layers * kv_heads;
  const int64_t wanted = std::llround(share * static_cast<double>(heads));
  if (wanted == 0) return {};
  std::vector<uint8_t> persistent(static_cast<size_t>(heads));
  const int64_t first = std::min(wanted, kv_heads), rest = heads - first, more = wanted - first;
  std::fill_n(persistent.begin(), first, 1);
  std::vector<int64_t> others(static_cast<size_t>(rest));
  std::iota(others.begin(), others.end(), first);
  if (difficulty.empty()) {
    for (int64_t i = 0; i < more; ++i) persistent[static_cast<size_t>(first + i * rest / more)] = 1;
    return persistent;
  }
  std::stable_sort(others.begin(), others.end(), [&](int64_t a, int64_t b) {
    return difficulty[static_cast<size_t>(a)] > difficulty[static_cast<size_t>(b)];
  });
  for (int64_t i = 0; i < more; ++i) {
    persistent[static_cast<size_t>(others[static_cast<size_t>(i)])] = 1;
  }
  return persistent;
}

}  // namespace sluice
