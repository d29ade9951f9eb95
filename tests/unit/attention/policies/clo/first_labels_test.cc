#include "src/attention/policies/clo/clo_policy.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "tests/test_main.h"
#include "tests/unit/attention/policies/clo/clo_case.h"
#include "tests/unit/attention/policy_traffic.h"

namespace sluice {
namespace {

using testing::CheckAgainstNaive;
using testing::HintedQueries;
using testing::MakeClo;
using testing::NaiveCase;
using testing::PolicyRig;
using testing::SumsOf;
using testing::TurningQueries;

void TestFirstLabels(const PolicyRig::Shape& shape) {
  using Labels = NaiveCase::Labels;
  for (const Labels labels : {Labels::kComputed, Labels::kHinted}) {
    NaiveCase c{96, 3, 402, 20};  // a topic goes on for a while
    c.labels = labels;
    const PolicyStatistics::Layer some = CheckAgainstNaive(shape, c);
    CHECK(some.misses < some.lookups / 3);
    c.steps = 1;
    const PolicyStatistics::Layer first = CheckAgainstNaive(shape, c);
    CHECK(first.misses * 2 < first.lookups);  // without a label all would miss
    c.steps = 12;
    c.persistent = {1, 1, 0, 1, 0, 0};
    c.ahead = true;
    CheckAgainstNaive(shape, c);
    c.persistent = {};
    c.context = 100;  // there are places for all tokens
    CheckAgainstNaive(shape, c);
    c.context = 40;
    CheckAgainstNaive(shape, c);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("a sequence begins with what the last row of its prompt selects",
                           TestFirstLabels)

TEST_CASE("queries of a hint that are not those of the model or not finite change nothing") {
  const PolicyRig::Shape shape;
  const PolicyRig::Make make = TurningQueries(shape, true);
  const uint64_t seed = TestSeed();
  const auto decode = [&](const SelectionHints& hints) {
    PolicyRig rig(shape, make);
    PolicyOptions options = rig.Options();
    options.budget_tokens = 96;
    const auto policy = MakeClo(options);
    CHECK(policy->hint_queries() == int64_t{shape.layers} * shape.heads * shape.head_dim);
    rig.Admit(*policy, 0, seed, 300, 320, 0, hints);
    testing::Decoded decoded;
    for (int step = 0; step < 8; ++step) testing::Add(decoded, rig.Step(*policy, {0}), 0);
    rig.Release(*policy, 0);
    return decoded;
  };
  const testing::Decoded plain = decode({});
  SelectionHints hints = HintedQueries(shape, make, seed, 300);
  CHECK(decode(hints) != plain);
  SelectionHints fewer = hints;
  fewer.queries.pop_back();
  CHECK(decode(fewer) == plain);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    hints.queries[7] = bad;
    CHECK(decode(hints) == plain);
  }
}

TEST_CASE("a row that is computed again selects again, with the queries that it has then") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  const auto policy = MakeClo(options);
  CHECK(policy->rehearsals() == 1);
  rig.Admit(*policy, 0, TestSeed(), 300, 320);
  rig.Step(*policy, {0});
  const int64_t heads = int64_t{shape.layers} * shape.kv_heads;
  CHECK(SumsOf(*policy).misses == heads);
  rig.Rewind(0);
  rig.Step(*policy, {0});
  CHECK(SumsOf(*policy).misses == 2 * heads);
  rig.Release(*policy, 0);
}

}  // namespace
}  // namespace sluice
