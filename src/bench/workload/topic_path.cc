#include "src/bench/workload/topic_path.h"

#include <cmath>
#include <vector>

#include "src/base/rng.h"
#include "src/model/dummy_weights.h"

namespace sluice::bench {

void AddUniformRow(const std::string& name, uint64_t seed, int64_t row, double factor,
                   absl::Span<double> out) {
  constexpr double kUnit = 1.7320508075688772;  // Times u in [-1, 1): variance 1.
  std::vector<float> u(out.size());
  DummyUniform(name, seed, row * static_cast<int64_t>(u.size()), absl::MakeSpan(u));
  for (size_t i = 0; i < u.size(); ++i) out[i] += factor * kUnit * double{u[i]};
}

void TopicPath::Add(int64_t token, absl::Span<double> out) const {
  // A prime number of topics further on: topics of knots follow from the knots' numbers alone.
  constexpr double kJumpKnots = 4099;
  const double jumps = jump > 0 ? static_cast<double>(token / jump) : 0;
  const double at = static_cast<double>(token) * drift + jumps * kJumpKnots;
  const double knot = std::floor(at);
  const double angle = (at - knot) * M_PI / 2;
  const double factor = 1 / std::sqrt(1 + noise * noise);
  AddUniformRow(name + "topic", seed, TopicOf(knot), factor * std::cos(angle), out);
  AddUniformRow(name + "topic", seed, TopicOf(knot + 1), factor * std::sin(angle), out);
  AddUniformRow(name + "noise", seed, token, factor * noise, out);
}

int64_t TopicPath::TopicOf(double knot) const {
  SplitMix64 random(seed ^ (static_cast<uint64_t>(knot) * 0xD1B54A32D192ED03ull));
  return static_cast<int64_t>(random.Below(static_cast<uint64_t>(topics)));
}

}  // namespace sluice::bench
