// LabelLookup: which heads may use what they selected earlier.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The state of `slots` slots, and what a step needs.
struct Labels {
  Labels(int32_t of_slots, int32_t of_heads, int32_t of_kv_heads, int32_t dim)
      : heads(of_heads),
        kv_heads(of_kv_heads),
        head_dim(dim),
        labels(int64_t{of_slots} * of_heads * dim),
        labelled(int64_t{of_slots} * of_kv_heads),
        importance(of_heads),
        thresholds(of_kv_heads),
        counters(of_slots) {
    for (float& weight : importance) weight = 1;
    for (float& threshold : thresholds) threshold = 0.8f;
    for (SparseCounters& counter : counters) counter = {};
  }

  LabelLookupParams Params(const Guarded<float>& q, const Guarded<int32_t>& slots,
                           const Guarded<int32_t>& positions, Guarded<int32_t>& missed) {
    LabelLookupParams p{};
    p.q = q.data();
    p.q_stride = q.size() / slots.size();
    p.slots = slots.data();
    p.positions = positions.data();
    p.importance = importance.data();
    p.thresholds = thresholds.data();
    p.labels = labels.data();
    p.labelled = labelled.data();
    p.missed = missed.data();
    p.counters = counters.data();
    p.rows = static_cast<int32_t>(slots.size());
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.refresh_tokens = refresh_tokens;
    p.refresh_divisor = refresh_divisor;
    p.rule = rule;
    return p;
  }

  int32_t heads, kv_heads, head_dim;
  int32_t refresh_tokens = 0, refresh_divisor = 0;
  SimilarityRule rule = SimilarityRule::kHarmonic;
  Guarded<float> labels;
  Guarded<int32_t> labelled;  // -1: no labels
  Guarded<float> importance, thresholds;
  Guarded<SparseCounters> counters;
};

// One slot, one KV head with two query heads of 16 elements, of which two are used: each query is
// (cosine, sine) of an angle.
class OneGroup {
 public:
  explicit OneGroup(const KernelTable& table) : table_(table), state_(1, 2, 1, 16) {}

  Labels& state() { return state_; }
  // Returns whether queries of these cosines with the label (1, 0) miss; they move the label then.
  bool Misses(float first, float second, int32_t position = 100) {
    Guarded<float> q(32);
    for (float& x : q) x = 0;
    const float cosines[2] = {first, second};
    for (int i = 0; i < 2; ++i) {
      q[16 * i] = 3 * cosines[i];
      q[16 * i + 1] = 3 * std::sqrt(std::max(1 - cosines[i] * cosines[i], 0.0f));
    }
    return Misses(q, position);
  }
  bool Misses(const Guarded<float>& q, int32_t position) {
    const Guarded<int32_t> slots = BufferOf({0}), positions = BufferOf({position});
    Guarded<int32_t> missed(1);
    RunWorkers(table_.label_lookup, state_.Params(q, slots, positions, missed), 1);
    CHECK(missed.Damage() + state_.labels.Damage() == "");
    return missed[0] != 0;
  }
  // Makes the label (1, 0) of both heads.
  void Label(int32_t position = 90) {
    state_.labelled[0] = -1;
    CHECK(Misses(1, 1, position));
    CHECK(state_.labelled[0] == position);
  }

 private:
  const KernelTable& table_;
  Labels state_;
};

void TestByHand(const KernelTable& table, Random&) {
  OneGroup group(table);
  Labels& state = group.state();
  const auto misses = [&](float first, float second) {
    group.Label();
    return group.Misses(first, second);
  };
  // Equal queries hit whatever their lengths, and the label stays.
  CHECK_FALSE(misses(1, 1));
  CHECK(state.labelled[0] == 90);
  // Equation 10 with equal weights: 2 / (1 / 0.7 + 1) = 0.8235, 2 / (1 / 0.6 + 1) = 0.75.
  CHECK_FALSE(misses(0.7f, 1));
  CHECK(misses(0.6f, 1));
  CHECK(state.labelled[0] == 100);
  CHECK(group.Misses(0.6f, 1));             // a row that is computed again
  CHECK_FALSE(group.Misses(0.6f, 1, 101));  // it is the label now
  // With weights 1 and 3, cosines 0.5 and 1: 4 / (2 + 3) = 0.8.
  state.importance[1] = 3;
  state.thresholds[0] = 0.799f;
  CHECK_FALSE(misses(0.5f, 1));
  state.thresholds[0] = 0.801f;
  CHECK(misses(0.5f, 1));
  // A cosine of 0 or less makes it 0, which only a threshold of 0 or less allows; a head without
  // weight does not count.
  state.thresholds[0] = 0.1f;
  CHECK(misses(-0.5f, 1));
  state.thresholds[0] = 0;
  CHECK_FALSE(misses(-0.5f, 1));
  state.thresholds[0] = 0.9f;
  state.importance[0] = 0;
  CHECK_FALSE(misses(-0.5f, 1));
  state.importance[1] = 0;
  CHECK_FALSE(misses(-0.5f, -1));
  // The other rules ask no weights.
  state.rule = SimilarityRule::kMin;
  state.thresholds[0] = 0.5f;
  CHECK_FALSE(misses(0.6f, 1));
  CHECK(misses(0.4f, 1));
  state.rule = SimilarityRule::kMean;
  CHECK_FALSE(misses(0.1f, 1));
  CHECK(misses(-0.1f, 1));
}
SLUICE_TEST_ON_EVERY_PATH("a head's similarity is that of the paper's equation", TestByHand)

void TestBadQueries(const KernelTable& table, Random&) {
  for (const SimilarityRule rule :
       {SimilarityRule::kHarmonic, SimilarityRule::kMin, SimilarityRule::kMean}) {
    OneGroup group(table);
    group.state().rule = rule;
    group.state().thresholds[0] = -1;  // whatever can be compared hits
    group.Label();
    CHECK_FALSE(group.Misses(-1, -1));
    Guarded<float> zero(32);
    for (float& x : zero) x = 0;
    CHECK(group.Misses(zero, 101));
    CHECK(group.Misses(1, 1, 102));  // the label has a length of 0
    CHECK_FALSE(group.Misses(1, 1, 103));
    for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
      Guarded<float> q(32);
      for (float& x : q) x = 1;
      q[17] = bad;
      group.Label();
      CHECK(group.Misses(q, 105));
      CHECK(group.Misses(q, 106));
      CHECK(group.Misses(1, 1, 107));
      CHECK_FALSE(group.Misses(1, 1, 108));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("queries that cannot be compared miss, and the next ones recover",
                          TestBadQueries)

void TestAges(const KernelTable& table, Random&) {
  OneGroup group(table);
  Labels& state = group.state();
  group.Label(90);
  CHECK_FALSE(group.Misses(1, 1, 100000));  // labels do not age
  state.refresh_tokens = 8;
  CHECK_FALSE(group.Misses(1, 1, 97));
  CHECK(group.Misses(1, 1, 98));
  CHECK(state.labelled[0] == 98);
  // At position 400 the age is 8 + 400 / 40 = 18.
  state.refresh_divisor = 40;
  group.Label(383);
  CHECK_FALSE(group.Misses(1, 1, 400));
  CHECK(group.Misses(1, 1, 401));
}
SLUICE_TEST_ON_EVERY_PATH("a label is renewed at the age that it is given", TestAges)

// Walks of queries of several slots, in any order of rows: decisions, labels and counters are the
// reference's.
void TestWalk(const KernelTable& table, Random& random) {
  struct Shape {
    int32_t heads, kv_heads, head_dim;
  };
  for (const Shape& shape : {Shape{8, 2, 128}, {10, 2, 64}, {3, 3, 48}, {40, 1, 256}}) {
    constexpr int32_t kSlots = 5, kRows = 4;
    Labels got(kSlots, shape.heads, shape.kv_heads, shape.head_dim);
    Labels want(kSlots, shape.heads, shape.kv_heads, shape.head_dim);
    for (int64_t i = 0; i < shape.heads; ++i) {
      got.importance[i] = want.importance[i] = static_cast<float>(random() % 4) / 3;
    }
    for (int64_t i = 0; i < shape.kv_heads; ++i) {
      got.thresholds[i] = want.thresholds[i] = 0.5f + 0.1f * static_cast<float>(random() % 5);
    }
    const int64_t of_slot = int64_t{shape.heads} * shape.head_dim, stride = of_slot + 3;
    Guarded<float> walks = NormalBuffer<float>(kSlots * of_slot, random);
    int64_t misses = 0, lookups = 0;
    for (int32_t step = 0; step < 40; ++step) {
      std::vector<int32_t> order = {0, 1, 2, 3, 4};
      std::shuffle(order.begin(), order.end(), random);
      Guarded<int32_t> slots(kRows), positions(kRows);
      Guarded<float> q = NormalBuffer<float>(kRows * stride, random);
      for (int32_t r = 0; r < kRows; ++r) {
        slots[r] = r == step % kRows ? -1 : order[static_cast<size_t>(r)];
        positions[r] = 100 + step;
        if (slots[r] < 0) continue;
        for (int64_t i = 0; i < of_slot; ++i) {
          float& at = walks[slots[r] * of_slot + i];
          at = 0.94f * at + 0.3f * q[r * stride + i];
          q[r * stride + i] = at;
        }
      }
      for (Labels* labels : {&got, &want}) {
        labels->rule = static_cast<SimilarityRule>(step / 10 % 3);
        labels->refresh_tokens = step % 2 == 0 ? 0 : 12;
      }
      const int64_t lists = int64_t{kRows} * shape.kv_heads;
      Guarded<int32_t> got_missed(lists), want_missed(lists);
      Guarded<int32_t> wanted(lists);  // in every third step some lists have no lookup
      for (int64_t list = 0; list < lists; ++list) {
        wanted[list] = step % 3 != 0 || random() % 2 == 0 ? 1 : 0;
        if (slots[list / shape.kv_heads] >= 0) lookups += wanted[list];
      }
      LabelLookupParams params = got.Params(q, slots, positions, got_missed);
      params.wanted = wanted.data();
      params.others = step % 2;
      RunThreads(table.label_lookup, params, 3);
      params = want.Params(q, slots, positions, want_missed);
      params.wanted = wanted.data();
      params.others = step % 2;
      RunWorkers(Reference().label_lookup, params, 1);
      CHECK(got_missed.Damage() + got.labels.Damage() + got.labelled.Damage() == "");
      REQUIRE(std::ranges::equal(got_missed.span(), want_missed.span()));
      REQUIRE(std::ranges::equal(got.labelled.span(), want.labelled.span()));
      REQUIRE(std::memcmp(got.labels.data(), want.labels.data(), want.labels.span().size_bytes()) ==
              0);
      for (int64_t list = 0; list < lists; ++list)
        misses += wanted[list] != 0 ? want_missed[list] : 0;
    }
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      CHECK(got.counters[slot].lookups == want.counters[slot].lookups);
      CHECK(got.counters[slot].misses == want.counters[slot].misses);
      lookups -= got.counters[slot].lookups;
      misses -= got.counters[slot].misses;
    }
    CHECK(lookups == 0);
    CHECK(misses == 0);
  }
}
SLUICE_TEST_ON_EVERY_PATH("lookups agree with the reference over walks of queries", TestWalk)

}  // namespace
}  // namespace sluice::kernels
