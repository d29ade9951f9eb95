// The similarity of a group of query heads with their label, in float32, for the paths that compute
// LabelLookup (kernels/hash_params.h).
#pragma once

#include "kernels/hash_params.h"

namespace sluice::kernels {
namespace {

class GroupSimilarity {
 public:
  // Adds a head: q . label, q . q and label . label.
  constexpr void Add(float product, float qq, float ll, float weight) {
    const float lengths = __builtin_sqrtf(qq) * __builtin_sqrtf(ll);
    const float cosine = product / lengths;
    // False for NaN, too.
    comparable_ = comparable_ && lengths > 0 && lengths < __builtin_inff() && cosine > -2.0f;
    least_ = cosine < least_ ? cosine : least_;
    sum_ += cosine;
    heads_ += 1;
    if (weight > 0) {
      weights_ += weight;
      inverse_ += cosine > 0 ? weight / cosine : __builtin_inff();
    }
  }
  constexpr bool IsAtLeast(float threshold, SimilarityRule rule) const {
    if (!comparable_) return false;
    if (rule == SimilarityRule::kMin) return least_ >= threshold;
    if (rule == SimilarityRule::kMean) return sum_ / static_cast<float>(heads_) >= threshold;
    return (weights_ > 0 ? weights_ / inverse_ : 1.0f) >= threshold;
  }

 private:
  float least_ = __builtin_inff(), sum_ = 0, weights_ = 0, inverse_ = 0;
  int heads_ = 0;
  bool comparable_ = true;
};

}  // namespace
}  // namespace sluice::kernels
