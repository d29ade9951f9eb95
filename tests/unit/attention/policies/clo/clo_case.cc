#include "tests/unit/attention/policies/clo/clo_case.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <utility>

#include "src/attention/policies/clo/clo_policy.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policies/clo/naive_head.h"

namespace sluice::testing {
namespace {

using Who = PolicyRig::Who;

// Kernels may round queries to bf16 before a product.
constexpr double kTolerance = 1e-2;

}  // namespace

std::unique_ptr<AttentionPolicy> MakeClo(const PolicyOptions& options) {
  auto policy = NewCloPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

PolicyRig::Make TurningQueries(const PolicyRig::Shape& shape, bool real) {
  const PolicyRig::Make random = RandomVectors(shape, 0.3f);
  return [shape, random, real](uint64_t seed, int layer, int position) {
    PolicyRig::Vectors vectors = random(seed, layer, position);
    const int of_head = shape.heads / shape.kv_heads * shape.head_dim;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const PolicyRig::Vectors topic =
          random(seed + 77, layer, (position + 3 * head) / (7 + 4 * head));
      for (int i = head * of_head; i < (head + 1) * of_head; ++i) {
        const auto at = static_cast<size_t>(i);
        vectors.predicted[at] = RoundedToBf16(topic.q[at] + 0.4f * vectors.q[at]);
        if (real) vectors.q[at] = RoundedToBf16(topic.q[at] + 0.3f * vectors.q[at]);
      }
    }
    return vectors;
  };
}

PolicyStatistics::Layer SumsOf(const AttentionPolicy& policy) {
  PolicyStatistics::Layer sums;
  for (const PolicyStatistics::Layer& layer : policy.Statistics().layers) {
    sums.selected += layer.selected;
    sums.missing += layer.missing;
    sums.recalled += layer.recalled;
    sums.lookups += layer.lookups;
    sums.misses += layer.misses;
    sums.resident_selected += layer.resident_selected;
    sums.link_bytes += layer.link_bytes;
  }
  return sums;
}

SelectionHints HintedQueries(const PolicyRig::Shape& shape, const PolicyRig::Make& make,
                             uint64_t seed, int context) {
  SelectionHints hints;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> q = make(seed, layer, context - 1).q;
    hints.queries.insert(hints.queries.end(), q.begin(), q.end());
  }
  return hints;
}

PolicyStatistics::Layer CheckAgainstNaive(const PolicyRig::Shape& shape, const NaiveCase& c) {
  using Labels = NaiveCase::Labels;
  const PolicyRig::Make make = TurningQueries(shape, c.labels != Labels::kNone);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.budget_tokens = c.budget;
  options.clo.budget_divisor = c.divisor;
  options.clo.refresh = c.refresh;
  options.clo.similarity = c.similarity;
  // The heads that are named are the hardest.
  options.clo.persistent_share = c.persistent.empty()
                                     ? 0
                                     : static_cast<double>(std::ranges::count(c.persistent, 1)) /
                                           static_cast<double>(c.persistent.size());
  for (const uint8_t hard : c.persistent) options.clo.difficulty.push_back(hard);
  options.clo.misses = options.clo.difficulty;
  options.clo.refill = c.refill;
  options.clo.persistent_ahead = c.ahead;
  options.clo.predicted = c.predicted;
  if (c.as_hata) {
    options.clo.hash_levels = 1;
    options.clo.centred = false;
    options.reduction = kernels::GroupReduction::kMean;
  }
  const auto policy = MakeClo(options);
  const uint64_t seed = TestSeed();
  SelectionHints hints;
  if (c.labels == Labels::kHinted) hints = HintedQueries(shape, make, seed, c.context);
  rig.Admit(*policy, 1, seed, c.context, c.context + c.steps, c.labels == Labels::kComputed ? 3 : 0,
            hints);
  std::vector<NaiveHead> heads;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      heads.emplace_back(shape, options, make, seed, std::pair(layer, head), c.context,
                         c.context + c.steps, c.labels != Labels::kNone);
    }
  }
  for (int step = 0; step < c.steps; ++step) {
    const int position = rig.position(1);
    const auto out = rig.Step(*policy, {1});
    for (int layer = 0; layer < shape.layers; ++layer) {
      INFO("step " << step << " layer " << layer);
      std::vector<std::set<int>> attended;
      for (int head = 0; head < shape.kv_heads; ++head) {
        attended.push_back(
            heads[static_cast<size_t>(layer * shape.kv_heads + head)].Attend(position));
      }
      const auto want = rig.Naive(seed, layer, position, [&](int head, int token) {
        return attended[static_cast<size_t>(head)].contains(token) ? Who::kReal : Who::kNobody;
      });
      CHECK(RelativeError(out[static_cast<size_t>(layer)][0], want) <= kTolerance);
    }
  }
  const PolicyStatistics::Layer sums = SumsOf(*policy);
  PolicyStatistics::Layer naive;
  for (const NaiveHead& head : heads) {
    naive.lookups += head.lookups;
    naive.misses += head.misses;
    naive.selected += head.selected;
    naive.recalled += head.fetched;
  }
  CHECK(sums.lookups == naive.lookups);
  CHECK(sums.misses == naive.misses);
  CHECK(sums.selected == naive.selected);
  CHECK(sums.recalled == naive.recalled);
  CHECK(sums.missing == sums.recalled);  // everything that is new is fetched, and nothing else
  const int64_t written = int64_t{c.steps} * shape.layers * shape.kv_heads;
  CHECK(sums.link_bytes == (sums.recalled + written) * 2 * shape.head_dim * 2);
  rig.Release(*policy, 1);
  return sums;
}

}  // namespace sluice::testing
