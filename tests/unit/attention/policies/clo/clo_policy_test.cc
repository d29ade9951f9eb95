#include "src/attention/policies/clo/clo_policy.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "src/attention/policies/clo/hash_matrix.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/model/step_traffic.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policies/clo/naive_head.h"
#include "tests/unit/attention/policy_rig.h"
#include "tests/unit/attention/policy_traffic.h"

namespace sluice {
namespace {

using testing::kRing;
using testing::kSink;
using testing::NaiveHead;
using testing::PolicyRig;
using testing::RandomVectors;
using testing::RelativeError;
using testing::RoundedToBf16;
using Who = PolicyRig::Who;

// Kernels may round queries to bf16 before a product.
constexpr double kTolerance = 1e-2;

std::unique_ptr<AttentionPolicy> MakePolicy(const PolicyOptions& options) {
  auto policy = NewCloPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

// Makes vectors whose predicted queries turn slowly, with a jump now and then in one KV head or
// the other. With `real` the queries themselves do so, too.
PolicyRig::Make TurningQueries(const PolicyRig::Shape& shape, bool real = false) {
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

struct NaiveCase {
  int budget, divisor, context, steps;
  bool refresh = true;
  float similarity = 0.8f;
  std::vector<uint8_t> persistent = {};
  bool ahead = false;
  std::vector<float> predicted = {};
  PolicyOptions::Clo::Refill refill = PolicyOptions::Clo::Refill::kDelta;
  bool as_hata = false;  // codes and scores as published
  // How the sequence gets its first labels: it has none, it computes the last rows of its prompt
  // itself, or a hint has their queries.
  enum class Labels { kNone, kComputed, kHinted } labels = Labels::kNone;
};

// Returns a hint with the queries of the last of `context` rows.
SelectionHints HintedQueries(const PolicyRig::Shape& shape, const PolicyRig::Make& make,
                             uint64_t seed, int context) {
  SelectionHints hints;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> q = make(seed, layer, context - 1).q;
    hints.queries.insert(hints.queries.end(), q.begin(), q.end());
  }
  return hints;
}

// Decodes one sequence and checks every row against softmax over what the naive head attends to.
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
  const auto policy = MakePolicy(options);
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

void TestNaive(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  const PolicyStatistics::Layer some = CheckAgainstNaive(shape, {96, 0, 300, 40});
  CHECK(some.misses * 20 > some.lookups);
  CHECK(some.misses * 2 < some.lookups);
  // A share of a long row is more than the budget.
  CheckAgainstNaive(shape, {80, 3, 400, 24});
  NaiveCase published{96, 0, 300, 24};
  published.as_hata = true;
  CheckAgainstNaive(shape, published);
  shape.heads = 6;
  shape.kv_heads = 1;
  CheckAgainstNaive(shape, {96, 4, 450, 24});
  shape.heads = 10;  // groups of five, as in Qwen3-14B
  shape.kv_heads = 2;
  shape.head_dim = 128;
  shape.block_tokens = 32;
  CheckAgainstNaive(shape, {96, 0, 333, 20});
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a row attends to what each head selected for queries like its own, and to the ring", TestNaive)

void TestPersistentHeads(const PolicyRig::Shape& of, bool ahead) {
  PolicyRig::Shape shape = of;
  REQUIRE(shape.layers == 3);
  NaiveCase c{80, 3, 400, 24};
  c.ahead = ahead;
  // Layer 0 is persistent, one head of layer 1 is, and none of layer 2.
  c.persistent = {1, 1, 0, 1, 0, 0};
  const PolicyStatistics::Layer some = CheckAgainstNaive(shape, c);
  CHECK(some.lookups == int64_t{3} * c.steps);  // persistent heads look nothing up
  // Layer 2 comes after layer 0 now, and its heads select by their own queries.
  NaiveCase unpredictable = c;
  unpredictable.persistent = {1, 1, 0, 0, 1, 1};
  unpredictable.predicted = {1, 0.95f, 0.3f};
  CheckAgainstNaive(shape, unpredictable);
  shape.head_dim = 64;
  c.persistent = {1, 1, 0, 0, 1, 1};
  CheckAgainstNaive(shape, c);
  c.persistent = {1, 1, 1, 1, 1, 1};
  c.context = 90;  // shorter than what the ring and the budget hold
  const PolicyStatistics::Layer all = CheckAgainstNaive(shape, c);
  CHECK(all.lookups == 0);
  CHECK(all.recalled == 0);
  CHECK(all.selected == 0);
  CHECK(all.resident_selected > 0);
}
void TestPersistent(const PolicyRig::Shape& shape) { TestPersistentHeads(shape, false); }
void TestPersistentAhead(const PolicyRig::Shape& shape) { TestPersistentHeads(shape, true); }
SLUICE_TEST_ON_CPU_AND_GPU(
    "a persistent head selects by its own queries in every step, and fetches nothing",
    TestPersistent)
SLUICE_TEST_ON_CPU_AND_GPU("a persistent head may select by predicted queries", TestPersistentAhead)

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
    const auto policy = MakePolicy(options);
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

void TestReplace(const PolicyRig::Shape& shape) {
  NaiveCase c{96, 4, 400, 24};
  const PolicyStatistics::Layer delta = CheckAgainstNaive(shape, c);
  c.refill = PolicyOptions::Clo::Refill::kReplace;
  const PolicyStatistics::Layer replace = CheckAgainstNaive(shape, c);
  // The same heads miss and select the same, and every selected token outside the ring is fetched.
  CHECK(replace.misses == delta.misses);
  CHECK(replace.selected == delta.selected);
  CHECK(replace.recalled == replace.selected - replace.misses * kRing);
  CHECK(replace.recalled > delta.recalled);
}
SLUICE_TEST_ON_CPU_AND_GPU("refill by replacement fetches all that a head selected", TestReplace)

// Where the prediction is right, it makes no difference to a bit of the result whether tokens are
// fetched in time, were kept, or have been in HBM all along.
void TestWhereTokensLie(const PolicyRig::Shape& shape) {
  const PolicyRig::Make random = RandomVectors(shape, 0);
  const uint64_t seed = TestSeed();
  const auto decode = [&](auto change) {
    PolicyRig rig(shape, random);
    PolicyOptions options = rig.Options();
    options.budget_tokens = 80;
    options.clo.reuse = false;
    change(options.clo);
    const auto policy = MakePolicy(options);
    rig.Admit(*policy, 1, seed, 300, 330);
    testing::Decoded decoded;
    for (int step = 0; step < 20; ++step) testing::Add(decoded, rig.Step(*policy, {1}), 0);
    const PolicyStatistics::Layer sums = SumsOf(*policy);
    rig.Release(*policy, 1);
    return std::pair(decoded, sums.recalled);
  };
  const auto [hata, none] = decode([](PolicyOptions::Clo& clo) { clo.persistent_share = 1; });
  const auto [lru, some] = decode([](PolicyOptions::Clo& clo) { clo.resident_share = 0.5; });
  const auto [half, fewer] = decode([](PolicyOptions::Clo& clo) { clo.persistent_share = 0.5; });
  const auto [fetched, all] =
      decode([](PolicyOptions::Clo& clo) { clo.refill = PolicyOptions::Clo::Refill::kReplace; });
  CHECK(lru == hata);
  CHECK(half == hata);
  CHECK(fetched == hata);
  CHECK(none == 0);
  CHECK(some > 0);
  CHECK(fewer > 0);
  CHECK(all > some);
}
SLUICE_TEST_ON_CPU_AND_GPU("the bits of a row do not depend on where its tokens lay",
                           TestWhereTokensLie)

void TestNeverAndAlways(const PolicyRig::Shape& shape) {
  // Whatever can be compared hits: the first row selects, and nothing is fetched later.
  NaiveCase c{96, 0, 300, 20, /*refresh=*/false, /*similarity=*/-1};
  const PolicyStatistics::Layer never = CheckAgainstNaive(shape, c);
  CHECK(never.misses == int64_t{shape.layers} * shape.kv_heads);
  // With a refresh a label lasts a quarter of the budget.
  c.refresh = true;
  c.steps = 25;
  const PolicyStatistics::Layer aged = CheckAgainstNaive(shape, c);
  CHECK(aged.misses == 2 * int64_t{shape.layers} * shape.kv_heads);
  // No two queries are equal, so every row selects anew.
  c.similarity = 1;
  const PolicyStatistics::Layer always = CheckAgainstNaive(shape, c);
  CHECK(always.misses == always.lookups);
  CHECK(always.recalled > never.recalled);
}
SLUICE_TEST_ON_CPU_AND_GPU("a threshold of -1 never selects again, and one of 1 always does",
                           TestNeverAndAlways)

void Traffic(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  const auto check = [&](int divisor, bool refresh, double persistent) {
    testing::CheckTraffic(shape, TurningQueries(shape), [&](const PolicyRig& rig, bool) {
      PolicyOptions options = rig.Options();
      options.budget_tokens = 80;
      options.dense_layers = 1;
      options.clo.budget_divisor = divisor;
      options.clo.refresh = refresh;
      options.clo.persistent_share = persistent;
      return MakePolicy(options);
    });
  };
  check(0, true, 0);
  check(3, true, 0.7);
  shape.threads = 3;
  shape.row_bucket = 3;
  check(4, false, 0.5);
}
SLUICE_TEST_ON_CPU_AND_GPU("clo: sequences that come and go give to the bit what each gives alone",
                           Traffic)

using Mover = PolicyOptions::Mover;

// The sequences in company are fetched by way of the CPU, and those alone by the device.
void TrafficOfMovers(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  shape.row_bucket = 3;
  testing::CheckTraffic(shape, TurningQueries(shape), [&](const PolicyRig& rig, bool alone) {
    PolicyOptions options = rig.Options();
    options.budget_tokens = 80;
    options.clo.budget_divisor = 4;
    options.clo.mover = alone ? Mover::kUva : Mover::kCpu;
    options.clo.mover_workers = 3;
    return MakePolicy(options);
  });
}
SLUICE_TEST_ON_CPU_AND_GPU("clo: a mover by way of the CPU gives the bits of the device's own",
                           TrafficOfMovers)

TEST_CASE("clo: workers of a mover are counted as those that gather") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  CHECK(MakePolicy(options)->Workers().workers == 0);
  options.clo.mover = Mover::kCpu;
  const auto policy = MakePolicy(options);
  rig.Admit(*policy, 0, TestSeed(), 300, 320);
  for (int step = 0; step < 10; ++step) rig.Step(*policy, {0});
  const WorkerStatistics workers = policy->Workers();
  CHECK(workers.duty == WorkerDuty::kGather);
  CHECK(workers.workers == 4);
  CHECK(workers.tokens == SumsOf(*policy).recalled);
  CHECK(workers.tokens > 0);
  rig.Release(*policy, 0);
}

#ifndef SLUICE_NO_FAILPOINTS

// Decodes all slots while a worker meets `fault`, and returns the rows of the sequences that live
// on, by slot.
std::map<int, testing::Decoded> DecodeWithFault(const PolicyRig::Shape& shape, const char* fault,
                                                absl::Duration deadline) {
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 80;
  options.clo.similarity = 1;  // every head misses, so every worker gathers
  options.clo.mover = Mover::kCpu;
  options.worker_deadline = deadline;
  const auto policy = MakePolicy(options);
  std::vector<int32_t> slots;
  for (int slot = 0; slot < shape.slots; ++slot) {
    rig.Admit(*policy, slot, TestSeed() + static_cast<uint64_t>(slot), 300 + slot, 400);
    slots.push_back(slot);
  }
  std::map<int, testing::Decoded> decoded;
  const ScopedFailpoints armed(fault);
  for (int step = 0; step < 8; ++step) {
    const auto out = rig.Step(*policy, slots);
    for (size_t row = 0; row < slots.size(); ++row) testing::Add(decoded[slots[row]], out, row);
    // A sequence that its workers failed ends, and its slot becomes another's at once.
    std::erase_if(slots, [&](int slot) {
      const absl::Status health = policy->SlotHealth(slot);
      if (health.ok()) return false;
      CHECK(absl::IsInternal(health));
      CHECK(ReasonOf(health) == "WORKER_FAILED");
      decoded.erase(slot);
      CHECK(policy->Warm(slot));
      rig.Release(*policy, slot);
      rig.Admit(*policy, slot, TestSeed() + 50, 200, 300);
      return true;
    });
  }
  for (int slot = 0; slot < shape.slots; ++slot) rig.Release(*policy, slot);
  CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
  return decoded;
}

void FaultsOfMovers(const PolicyRig::Shape& shape) {
  constexpr absl::Duration kLong = absl::Seconds(60);
  const auto well = DecodeWithFault(shape, "attention.worker=off", kLong);
  CHECK(std::ssize(well) == shape.slots);
  const auto check = [&](const char* fault, absl::Duration deadline) {
    INFO(fault);
    const auto left = DecodeWithFault(shape, fault, deadline);
    CHECK(std::ssize(left) == shape.slots / 2);
    for (const auto& [slot, rows] : left) CHECK(rows == well.at(slot));
  };
  check("attention.worker=error*1@5", kLong);
  check("attention.worker_exit=error*1@5", kLong);
  check("attention.worker=delay(2s)*1@5", absl::Seconds(1));
  // A worker that is slow, but within the deadline, ends nobody.
  CHECK(DecodeWithFault(shape, "attention.worker=delay(200ms)*1@5", kLong) == well);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "clo: a fault of a mover's worker ends the sequences of its group, and others keep their bits",
    FaultsOfMovers)

#endif

TEST_CASE("a row that is computed again selects again, with the queries that it has then") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  const auto policy = MakePolicy(options);
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

TEST_CASE("random hash matrices have orthogonal columns, and bits that tell angles") {
  const HashShape shape{2, 2, 64, 160};
  const std::vector<float> hash = RandomHash(shape, 5);
  REQUIRE(std::ssize(hash) == shape.elements());
  CHECK(hash == RandomHash(shape, 5));
  CHECK(hash != RandomHash(shape, 6));
  const auto product = [&](int64_t matrix, int64_t a, int64_t b) {
    double sum = 0;
    for (int64_t d = 0; d < 64; ++d) {
      const float* row = hash.data() + (matrix * 64 + d) * 160;
      sum += double{row[a]} * double{row[b]};
    }
    return sum;
  };
  for (int64_t matrix = 0; matrix < 4; ++matrix) {
    for (int64_t a = 0; a < 160; ++a) {
      CHECK(product(matrix, a, a) == Approx(1).epsilon(1e-5));
      for (int64_t b = a + 1; b < std::min<int64_t>(a / 64 * 64 + 64, 160); ++b) {
        REQUIRE(std::abs(product(matrix, a, b)) < 1e-5);
      }
    }
  }
  // Two vectors at 60 degrees differ in a third of the bits, give or take what 640 bits allow.
  int differing = 0;
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    for (size_t bit = 0; bit < 160; ++bit) {
      const float x = hash[matrix * 64 * 160 + bit], y = hash[(matrix * 64 + 1) * 160 + bit];
      differing += (x > 0) != (0.5f * x + 0.8660254f * y > 0) ? 1 : 0;
    }
  }
  CHECK(std::abs(differing / 640.0 - 1.0 / 3) < 0.06);
}

TEST_CASE("a step reads what its heads keep, and codes of the heads that miss alone") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  const auto policy = MakePolicy(options);
  ModelConfig config;
  config.layers = shape.layers;
  config.heads = shape.heads;
  config.head_dim = shape.head_dim;
  config.hidden_size = 100;
  config.vocab_size = 7;
  const StepModel model{config, rig.hbm().layout(), 1'000'000};
  // In each layer a head missed in 4 of 20 lookups, and then selected 100 tokens, 30 of them new.
  PolicyStatistics statistics;
  statistics.layers.resize(static_cast<size_t>(shape.layers));
  for (PolicyStatistics::Layer& layer : statistics.layers) {
    layer.steps = 10;
    layer.lookups = 20;
    layer.misses = 4;
    layer.selected = 400;
    layer.missing = layer.recalled = 120;
  }
  const double token = 2 * 2 * shape.head_dim;  // K and V of a head, bf16
  const MemoryTraffic bytes = BytesOfStep(model, *policy, statistics, 2, 500);
  const double own = shape.kv_heads * token, brought = 12 * token;
  const double codes = 0.2 * static_cast<double>(policy->MetadataBytes(500));
  const double shared = 1'000'000 - 7 * 100 * 2 + 2 * (2.0 * 100 * shape.heads * shape.head_dim);
  CHECK(policy->MetadataBytes(500) == 500 * shape.kv_heads * 18);
  CHECK(bytes.hbm ==
        Approx(shared + 2 * shape.layers * (own + shape.kv_heads * 100 * token + brought + codes)));
  CHECK(bytes.to_device == Approx(2 * shape.layers * brought));
  CHECK(bytes.dram == Approx(bytes.to_device));
  // Workers that gather read it, write it to staging, and send nothing else over the link.
  options.clo.mover = Mover::kCpu;
  const MemoryTraffic gathered = BytesOfStep(model, *MakePolicy(options), statistics, 2, 500);
  CHECK(gathered.dram == Approx(3 * bytes.dram));
  CHECK(gathered.hbm == bytes.hbm);
  CHECK(gathered.to_device == bytes.to_device);
  CHECK(gathered.to_host == bytes.to_host);
  // One of the two heads is persistent, and selected 110 tokens in every step.
  PolicyStatistics half = statistics;
  for (PolicyStatistics::Layer& layer : half.layers) {
    layer.lookups = 10;
    layer.misses = 2;
    layer.selected = 200;
    layer.resident_selected = 1100;
  }
  CHECK(BytesOfStep(model, *policy, half, 2, 500).hbm ==
        Approx(shared + 2 * shape.layers *
                            (own + (100 + 110) * token + brought +
                             0.6 * static_cast<double>(policy->MetadataBytes(500)))));
  // Where nothing missed, it is what has a place.
  for (PolicyStatistics::Layer& layer : statistics.layers) {
    layer.misses = layer.selected = layer.missing = layer.recalled = 0;
  }
  CHECK(BytesOfStep(model, *policy, statistics, 2, 500).hbm ==
        Approx(shared +
               2 * shape.layers *
                   (own + shape.kv_heads * static_cast<double>(policy->exact_tokens()) * token)));
}

TEST_CASE("clo: options out of range are refused by name") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  const auto refused = [&](const char* what, auto change) {
    PolicyOptions options = rig.Options();
    change(options);
    const absl::Status status = NewCloPolicy(options).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(what));
  };
  refused("budget_tokens: policy", [](PolicyOptions& o) { o.budget_tokens = kRing + kSink - 1; });
  refused("clo_budget_divisor: ", [](PolicyOptions& o) { o.clo.budget_divisor = -1; });
  refused("clo_similarity: ", [](PolicyOptions& o) { o.clo.similarity = 1.5f; });
  refused("clo_similarity: ",
          [](PolicyOptions& o) { o.clo.similarity = std::numeric_limits<float>::quiet_NaN(); });
  refused("clo_persistent_share: ", [](PolicyOptions& o) { o.clo.persistent_share = 1.1; });
  refused("clo_resident_share: ", [](PolicyOptions& o) { o.clo.resident_share = -0.1; });
  refused("clo.difficulty: ", [](PolicyOptions& o) { o.clo.difficulty = {1}; });
  refused("clo.predicted: ", [](PolicyOptions& o) { o.clo.predicted = {1}; });
  refused("clo.misses: ", [](PolicyOptions& o) { o.clo.misses = {1}; });
  refused("clo.thresholds: ", [](PolicyOptions& o) { o.clo.thresholds = {1, 1}; });
  refused("clo_hash_bits: ", [](PolicyOptions& o) { o.clo.hash_bits = 100; });
  refused("clo_hash_bits: ", [](PolicyOptions& o) { o.clo.hash_bits = 288; });
  refused("heads: ", [](PolicyOptions& o) { o.heads = 1000; });
  refused("clo_hash_levels: ", [](PolicyOptions& o) { o.clo.hash_levels = 3; });
  refused("score_reduction: ",
          [](PolicyOptions& o) { o.reduction = kernels::GroupReduction::kSoftmaxSum; });
  for (const int workers : {0, 65}) {
    refused("clo_mover_workers: policy", [&](PolicyOptions& o) {
      o.clo.mover = Mover::kCpu;
      o.clo.mover_workers = workers;
    });
  }
}

}  // namespace
}  // namespace sluice
