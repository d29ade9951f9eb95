#include "src/model/rope.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

namespace sluice {
namespace {

// The expected values were computed with transformers 5.23's modeling_rope_utils.py in float32.

// default, head_dim 32, {"rope_theta": 1000000.0}; element 0 and each after it.
const std::vector<float> kDefault = {
    1.00000000e+00f, 4.21696514e-01f, 1.77827939e-01f, 7.49894157e-02f,
    3.16227786e-02f, 1.33352149e-02f, 5.62341325e-03f, 2.37137382e-03f,
    1.00000005e-03f, 4.21696546e-04f, 1.77827940e-04f, 7.49894243e-05f,
    3.16227743e-05f, 1.33352160e-05f, 5.62341347e-06f, 2.37137374e-06f};

// linear, head_dim 64, {"rope_theta": 10000.0, "factor": 4.0}; element 0 and each after it.
const std::vector<float> kLinear = {
    2.50000000e-01f, 1.87473550e-01f, 1.40585333e-01f, 1.05424128e-01f, 7.90569410e-02f,
    5.92843480e-02f, 4.44569848e-02f, 3.33380364e-02f, 2.50000004e-02f, 1.87473539e-02f,
    1.40585322e-02f, 1.05424123e-02f, 7.90569466e-03f, 5.92843397e-03f, 4.44569858e-03f,
    3.33380373e-03f, 2.49999994e-03f, 1.87473558e-03f, 1.40585331e-03f, 1.05424121e-03f,
    7.90569466e-04f, 5.92843455e-04f, 4.44569858e-04f, 3.33380362e-04f, 2.50000012e-04f,
    1.87473546e-04f, 1.40585325e-04f, 1.05424137e-04f, 7.90569466e-05f, 5.92843462e-05f,
    4.44569851e-05f, 3.33380376e-05f};

// llama3, head_dim 64, {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
// "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}; element 0 and each after it.
const std::vector<float> kLlama3 = {
    1.00000000e+00f, 6.63601220e-01f, 4.40366626e-01f, 2.92227805e-01f, 1.93922758e-01f,
    1.28687382e-01f, 8.53971019e-02f, 5.66696189e-02f, 3.76060307e-02f, 2.49554086e-02f,
    1.02761155e-02f, 3.90911475e-03f, 1.31256948e-03f, 6.04927656e-04f, 4.01430763e-04f,
    2.66389950e-04f, 1.76776681e-04f, 1.17309231e-04f, 7.78465546e-05f, 5.16590735e-05f,
    3.42810235e-05f, 2.27489272e-05f, 1.50962178e-05f, 1.00178677e-05f, 6.64787058e-06f,
    4.41153452e-06f, 2.92749974e-06f, 1.94269251e-06f, 1.28917316e-06f, 8.55496921e-07f,
    5.67708810e-07f, 3.76732288e-07f};

// yarn, head_dim 128, {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings":
// 32768}; element 0 and every fourth after it.
const std::vector<float> kYarn = {
    1.00000000e+00f, 4.21696514e-01f, 1.77827939e-01f, 7.49894157e-02f,
    3.16227786e-02f, 1.33352149e-02f, 5.37532149e-03f, 1.84827659e-03f,
    6.02941145e-04f, 1.79841183e-04f, 4.44569851e-05f, 1.87473561e-05f,
    7.90569356e-06f, 3.33380399e-06f, 1.40585337e-06f, 5.92843435e-07f};

// yarn, head_dim 64, {"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings":
// 4096, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2, "truncate":
// false}; element 0 and each after it.
const std::vector<float> kYarnScaled = {
    1.00000000e+00f, 7.49894202e-01f, 5.62341332e-01f, 4.21696514e-01f, 3.16227764e-01f,
    2.37137392e-01f, 1.77827939e-01f, 1.33352146e-01f, 1.00000001e-01f, 7.49894157e-02f,
    5.62341288e-02f, 4.21696492e-02f, 3.16227786e-02f, 2.33312435e-02f, 1.50961196e-02f,
    9.52086132e-03f, 5.79010462e-03f, 3.32995923e-03f, 1.73821871e-03f, 7.34386675e-04f,
    1.23952457e-04f, 5.92843462e-05f, 4.44569851e-05f, 3.33380340e-05f, 2.49999994e-05f,
    1.87473543e-05f, 1.40585325e-05f, 1.05424142e-05f, 7.90569447e-06f, 5.92843435e-06f,
    4.44569832e-06f, 3.33380353e-06f};

// Compares values that may differ in the last bits, by which two libraries' float32 pow differ.
void CheckFrequencies(const RopeConfig& rope, int head_dim, const std::vector<float>& expected) {
  const std::vector<float> found = RopeInverseFrequencies(rope, head_dim);
  REQUIRE(found.size() == static_cast<size_t>(head_dim / 2));
  const size_t step = found.size() / expected.size();
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("element " << i * step);
    CHECK(std::abs(found[i * step] - expected[i]) <=
          3 * std::numeric_limits<float>::epsilon() * expected[i]);
  }
}

TEST_CASE("inverse frequencies of every kind are those of transformers") {
  RopeConfig rope;
  rope.theta = 1e6;
  CheckFrequencies(rope, 32, kDefault);

  rope = {.kind = RopeKind::kLinear, .theta = 10000.0, .factor = 4.0};
  CheckFrequencies(rope, 64, kLinear);

  rope = {.kind = RopeKind::kLlama3,
          .theta = 500000.0,
          .factor = 8.0,
          .original_max_position_embeddings = 1024,
          .low_freq_factor = 1.0,
          .high_freq_factor = 4.0};
  CheckFrequencies(rope, 64, kLlama3);

  rope = {.kind = RopeKind::kYarn,
          .theta = 1e6,
          .factor = 4.0,
          .original_max_position_embeddings = 32768,
          .beta_fast = 32,
          .beta_slow = 1};
  CheckFrequencies(rope, 128, kYarn);

  rope = {.kind = RopeKind::kYarn,
          .theta = 10000.0,
          .factor = 40.0,
          .original_max_position_embeddings = 4096,
          .beta_fast = 16,
          .beta_slow = 2,
          .truncate = false};
  CheckFrequencies(rope, 64, kYarnScaled);
}

TEST_CASE("yarn's attention factor follows the scale, or the ratio of the mscales") {
  CHECK(static_cast<float>(YarnAttentionFactor(4.0, {}, {})) == 1.13862943649292f);
  CHECK(static_cast<float>(YarnAttentionFactor(40.0, 0.707, 1.0)) == 0.9210423827171326f);
  CHECK(YarnAttentionFactor(40.0, 1.0, 1.0) == 1.0);
  // A single mscale has no effect, as in transformers.
  CHECK(YarnAttentionFactor(4.0, 0.707, {}) == YarnAttentionFactor(4.0, {}, {}));
  CHECK(YarnAttentionFactor(1.0, {}, {}) == 1.0);
}

TEST_CASE("only yarn scales cos and sin") {
  RopeConfig rope{.kind = RopeKind::kYarn, .attention_factor = 1.25};
  CHECK(RopeAttentionFactor(rope) == 1.25f);
  rope.kind = RopeKind::kLlama3;
  CHECK(RopeAttentionFactor(rope) == 1.0f);
}

}  // namespace
}  // namespace sluice
