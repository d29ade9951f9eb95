// TopK is exact, whatever the scores are.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct TopKOptions {
  int32_t k = 4;
  int32_t first_units = 0;
  int32_t last_units = 0;
  float margin = kInfinity;
  int32_t short_k = 0;
  int32_t k_divisor = 0;
  int32_t unit_tokens = 1;
  int32_t kv_heads = 1;
};

// Returns the maximum number of units that a row of up to `units` units selects.
int32_t CapacityFor(const TopKOptions& o, int32_t units) {
  return std::max({o.k, o.short_k, o.k_divisor > 0 ? units / o.k_divisor : 0});
}

// Returns the selection of one row of one head with these scores.
std::vector<int32_t> SelectedOf(const KernelTable& table, std::initializer_list<float> scores,
                                const TopKOptions& o) {
  const auto slots = BufferOf<int32_t>({3});
  const auto positions =
      BufferOf<int32_t>({static_cast<int32_t>(scores.size()) * o.unit_tokens - 1});
  const auto values = BufferOf<float>(scores);
  TestLists selected(1, CapacityFor(o, static_cast<int32_t>(scores.size())));
  RunWorkers(table.top_k,
             TopKParams{values.data(),
                        static_cast<int64_t>(scores.size()),
                        slots.data(),
                        positions.data(),
                        selected.view,
                        1,
                        1,
                        o.unit_tokens,
                        o.k,
                        o.first_units,
                        o.last_units,
                        o.margin,
                        o.short_k,
                        {},
                        nullptr,
                        o.k_divisor},
             1);
  CHECK(selected.Damage() == "");
  return selected.List(0);
}

using Units = std::vector<int32_t>;

void TestTopKByHand(const KernelTable& table, Random&) {
  const auto of = [&](std::initializer_list<float> scores, const TopKOptions& o) {
    return SelectedOf(table, scores, o);
  };
  // The best are listed in order of their numbers; among equals the lower ones are taken; -0 equals
  // 0.
  CHECK(of({1, 5, 3, 4, 2, 6}, {.k = 3}) == Units{1, 3, 5});
  CHECK(of({2, 2, 2, 2, 2, 2}, {.k = 3}) == Units{0, 1, 2});
  CHECK(of({1, 2, 1, 2, 1, 2}, {.k = 4}) == Units{0, 1, 3, 5});
  CHECK(of({-0.0f, 0.0f, -0.0f, 0.0f}, {.k = 2}) == Units{0, 1});
  CHECK(of({-1, -2, -3}, {.k = 2}) == Units{0, 1});
  // More units are asked for than there are.
  CHECK(of({1, kNan, -kInfinity}, {.k = 9}) == Units{0, 1, 2});
  CHECK(of({7}, {.k = 1, .first_units = 1}) == Units{0});
  // Forced units count, are never left out, and need no score.
  CHECK(of({0, 9, 8, 7, 0}, {.k = 3, .first_units = 1, .last_units = 1}) == Units{0, 1, 4});
  CHECK(of({0, 9, 8, 7, 0}, {.k = 2, .first_units = 1, .last_units = 1}) == Units{0, 4});
  CHECK(of({kNan, 9, 8, kNan}, {.k = 3, .first_units = 1, .last_units = 1}) == Units{0, 1, 3});
  CHECK(of({0, 0, 9}, {.k = 4, .first_units = 2, .last_units = 2}) == Units{0, 1, 2});
  CHECK(of({5}, {.k = 4, .first_units = 2, .last_units = 2}) == Units{0});
  // NaN is the worst score, and ties with -inf.
  CHECK(of({kNan, 1, kNan, 2}, {.k = 2}) == Units{1, 3});
  CHECK(of({kNan, -kInfinity, 2, kNan}, {.k = 2}) == Units{0, 2});
  CHECK(of({kNan, kNan, kNan}, {.k = 2}) == Units{0, 1});
  CHECK(of({kNan, kNan, kNan}, {.k = 2, .margin = 3}) == Units{0, 1});
  CHECK(of({1, kInfinity, 3, kInfinity}, {.k = 3}) == Units{1, 2, 3});
  CHECK(of({1, kInfinity, 3, kInfinity}, {.k = 3, .margin = 3}) == Units{1, 3});
  // The margin is below the largest of all, forced ones included; a unit that lies on it is in.
  CHECK(of({10, 5, 6, 7, 4}, {.k = 5, .margin = 4}) == Units{0, 2, 3});
  CHECK(of({10, 5, 6, 7, 4}, {.k = 4, .first_units = 1, .margin = 3}) == Units{0, 3});
  CHECK(of({10, 5, 6, 7, 4}, {.k = 4, .last_units = 1, .margin = 0}) == Units{0, 4});
  CHECK(of({10, 9, 9, 9, 8}, {.k = 3, .margin = 1}) == Units{0, 1, 2});
  CHECK(of({kNan, 5, 6}, {.k = 3, .margin = 100}) == Units{1, 2});
  // A row of 6 units selects a third of them, if that is more than k.
  CHECK(of({1, 5, 3, 4, 2, 0}, {.k = 1, .k_divisor = 3}) == Units{1, 3});
  CHECK(of({1, 5, 3, 4, 2, 0}, {.k = 3, .k_divisor = 3}) == Units{1, 2, 3});
  // A row of 5 units selects short_k of them, and one of 16 units one fewer.
  CHECK(of({1, 5, 3, 4, 2}, {.k = 1, .short_k = 3}) == Units{1, 2, 3});
  CHECK(of({1, 5, 3, 4, 2}, {.k = 2, .short_k = 1}) == Units{1, 3});
  CHECK(of({9, 8, 7, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {.k = 1, .short_k = 4}) ==
        Units{0, 1, 2});
}
SLUICE_TEST_ON_EVERY_PATH("top_k selects what its contract says", TestTopKByHand)
TEST_CASE("top_k selects what its contract says (reference)", "[kernels]") {
  OnPath("reference", TestTopKByHand);
}

// Scores of every difficult kind: equal, one bit apart, of all magnitudes, NaN and infinite.
float AnyScore(int kind, Random& random) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  switch (kind) {
    case 0:
      return normal(random);
    case 1:
      return std::round(normal(random) * 3);
    case 2:  // one bit apart, at random
      return __builtin_bit_cast(float, 0x3F800000u + static_cast<uint32_t>(random() % 40));
    case 3: {
      const float special[] = {kNan, -kInfinity, kInfinity, 0.0f, -0.0f, -kNan, 1e-42f, -1e-42f};
      return random() % 3 == 0 ? special[random() % 8] : normal(random);
    }
    default:  // any bits
      return __builtin_bit_cast(float, static_cast<uint32_t>(random()));
  }
}

struct TopKInput {
  TopKInput(const TopKOptions& options, int32_t most_units, Random& random)
      : o(options),
        units(most_units),
        score_stride(units + static_cast<int32_t>(random() % 3)),
        slots(BufferOf<int32_t>({1, -1, 0, 5, 2})),
        positions(5),
        wanted(int64_t{5} * o.kv_heads),
        some(random() % 3 == 0),
        scores(5 * o.kv_heads * score_stride) {
    for (int32_t& one : wanted) one = static_cast<int32_t>(random() % 2);
    const int32_t last = units * o.unit_tokens - 1;
    for (int32_t& position : positions) {
      position = static_cast<int32_t>(random() % static_cast<uint64_t>(last + 1));
    }
    positions[3] = last;
    const int kind = static_cast<int>(random() % 5);
    for (float& score : scores) score = AnyScore(kind, random);
  }

  TopKParams Params(const UnitLists& selected) const {
    return {scores.data(),
            score_stride,
            slots.data(),
            positions.data(),
            selected,
            5,
            o.kv_heads,
            o.unit_tokens,
            o.k,
            o.first_units,
            o.last_units,
            o.margin,
            o.short_k,
            {},
            some ? wanted.data() : nullptr,
            o.k_divisor};
  }

  const TopKOptions o;
  const int32_t units;
  const int64_t score_stride;
  Guarded<int32_t> slots, positions, wanted;
  const bool some;  // not every list is wanted
  Guarded<float> scores;
};

// Returns the units that a list could have chosen beside `chosen`, the best first.
std::vector<int32_t> Rest(const TopKParams& p, int64_t list, const std::vector<int32_t>& chosen) {
  const int64_t r = list / p.kv_heads;
  const float* const scores = p.scores + list * p.score_stride;
  std::vector<std::pair<float, int32_t>> order;
  float largest = -kInfinity;
  const int32_t units = !IsWanted(p, list, r) ? 0 : p.positions[r] / p.unit_tokens + 1;
  for (int32_t u = 0; u < units; ++u) {
    const float score = std::isnan(scores[u]) ? -kInfinity : scores[u];
    largest = std::max(largest, score);
    if (u < p.first_units || u >= units - p.last_units) continue;
    if (!std::binary_search(chosen.begin(), chosen.end(), u)) order.emplace_back(-score, u);
  }
  std::sort(order.begin(), order.end());
  std::vector<int32_t> rest;
  for (const auto& [minus, unit] : order) {
    if (std::isinf(p.margin) || -minus >= largest - p.margin) rest.push_back(unit);
  }
  return rest;
}

// Asked for runners-up, a path selects the same, and lists the best of the rest, all that there is
// room for. Only a GPU may list fewer.
void CheckRunnersUp(const KernelTable& table, const TopKInput& in, const TestLists& want,
                    int workers, Random& random) {
  const int64_t lists = 5 * int64_t{in.o.kv_heads};
  const auto room = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(in.o.k));
  TestLists got(lists, CapacityFor(in.o, in.units)), up(lists, room);
  TopKParams p = in.Params(got.view);
  p.runners_up = up.view;
  RunThreads(table.top_k, p, workers);
  CHECK(got.Damage() == "");
  CHECK(up.Damage() == "");
  for (int64_t list = 0; list < lists; ++list) {
    INFO("list " << list << ", room for " << room << " runners-up");
    REQUIRE(got.List(list) == want.List(list));
    std::vector<int32_t> best = Rest(p, list, want.List(list));
    const auto all = static_cast<size_t>(room);
    const size_t listed = up.List(list).size();
    if (std::string_view(table.name) == "cuda") {
      REQUIRE(listed <= std::min(all, best.size()));
    } else if (in.o.k > in.o.first_units + in.o.last_units) {
      REQUIRE(listed == std::min(all, best.size()));
    }
    best.resize(listed);
    std::sort(best.begin(), best.end());
    REQUIRE(up.List(list) == best);
  }
}

void CheckTopK(const KernelTable& table, const TopKOptions& o, int32_t units, Random& random) {
  INFO("k " << o.k << " of " << units << ", first " << o.first_units << ", last " << o.last_units
            << ", margin " << o.margin << ", units of " << o.unit_tokens);
  const TopKInput in(o, units, random);
  const int64_t lists = 5 * int64_t{o.kv_heads};
  const int32_t capacity = CapacityFor(o, units) + static_cast<int32_t>(random() % 4);
  TestLists want(lists, capacity);
  RunWorkers(Reference().top_k, in.Params(want.view), 1);
  for (int workers : {1, 4}) {
    TestLists got(lists, capacity);
    RunThreads(table.top_k, in.Params(got.view), workers);
    CHECK(got.Damage() == "");
    for (int64_t list = 0; list < lists; ++list) {
      INFO("list " << list);
      REQUIRE(got.List(list) == want.List(list));
      if (!IsWanted(in.Params(got.view), list, list / o.kv_heads)) REQUIRE(got.counts[list] == 0);
    }
    CheckRunnersUp(table, in, want, workers, random);
  }
}

void TestTopK(const KernelTable& table, Random& random) {
  for (int i = 0; i < 300; ++i) {
    TopKOptions o;
    o.first_units = static_cast<int32_t>(random() % 4);
    o.last_units = static_cast<int32_t>(random() % 4);
    o.k = std::max(1, o.first_units + o.last_units + static_cast<int32_t>(random() % 60));
    const float margins[] = {kInfinity, 0.0f, 0.5f, 2.0f, 4.5f};
    o.margin = margins[random() % 5];
    const int32_t sizes[] = {1, 1, 16, 32};
    o.unit_tokens = sizes[random() % 4];
    o.kv_heads = 1 + static_cast<int32_t>(random() % 3);
    if (random() % 3 == 0) o.short_k = static_cast<int32_t>(random() % 100);
    if (random() % 3 == 0) o.k_divisor = static_cast<int32_t>(1 + random() % 12);
    CheckTopK(table, o, 1 + static_cast<int32_t>(random() % 130), random);
  }
  // Tokens of a long context.
  CheckTopK(table, {.k = 2048, .first_units = 4, .last_units = 64, .kv_heads = 2}, 65536, random);
  CheckTopK(table, {.k = 13107, .last_units = 1, .margin = 4.5f}, 65536, random);
  for (int32_t units : {4097, 6000, 9000, 16384, 20001}) {
    CheckTopK(table, {.k = 2048}, units, random);
    CheckTopK(table, {.k = 500, .short_k = 1200}, units, random);
    CheckTopK(table, {.k = 500, .first_units = 4, .last_units = 64, .k_divisor = 10}, units,
              random);
    CheckTopK(table, {.k = 1000, .first_units = 1, .last_units = 2, .margin = 2.5f}, units, random);
  }
}
SLUICE_TEST_ON_EVERY_PATH("top_k selects what the reference does", TestTopK)

// The selection of a sparse indexer: 2,048 of a long context, among scores of which most are cut to
// 0 and many others are equal.
void TestTopKOfLongContext(const KernelTable& table, Random& random) {
  constexpr int32_t kK = 2048, kStride = 140000;
  const auto slots = BufferOf<int32_t>({0, 1, -1, 2, 3, 4, 5});
  const auto positions = BufferOf<int32_t>({kStride - 1, 131071, 7, kK - 1, kK, 99999, 32767});
  const int64_t rows = slots.size();
  Guarded<float> scores(rows * kStride);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores.data() + r * kStride;
    for (int64_t u = 0; u <= positions[r]; ++u) {
      const float grid = static_cast<float>(random() % 1000) / 8;
      const float any = std::normal_distribution<float>()(random);
      // The kinds are: few values; mostly zeros; all equal; no two alike; a few NaN.
      row[u] = r == 0 ? grid : r == 1 ? (u % 100 == 3 ? grid : 0.0f) : r == 5 ? 1.0f : any;
      if (r == 6 && u % 50 == 0) row[u] = kNan;
    }
  }
  constexpr int32_t kRunnersUp = 512;
  TestLists runners_up(rows, kRunnersUp);
  const auto run = [&](const KernelTable& path, int workers) {
    TestLists selected(rows, kK + 8);
    const TopKParams p = {scores.data(),
                          kStride,
                          slots.data(),
                          positions.data(),
                          selected.view,
                          static_cast<int32_t>(rows),
                          1,
                          1,
                          kK,
                          0,
                          0,
                          kInfinity,
                          0,
                          runners_up.view};
    RunWorkers(path.top_k, p, workers);
    CHECK(selected.Damage() == "");
    CHECK(runners_up.Damage() == "");
    return selected;
  };
  const TestLists want = run(Reference(), 1);
  const std::vector<int32_t> next = runners_up.List(rows - 1);
  REQUIRE(next.size() == kRunnersUp);
  const TestLists got = run(table, 3);
  for (int64_t r = 0; r < rows; ++r) {
    INFO("row " << r);
    CHECK(got.List(r) == want.List(r));
  }
  // A GPU lists the units that it has at hand: some hundreds, among scores without structure.
  const std::vector<int32_t> listed = runners_up.List(rows - 1);
  CHECK(std::includes(next.begin(), next.end(), listed.begin(), listed.end()));
  CHECK(listed.size() >= kRunnersUp / 2);
}
SLUICE_TEST_ON_EVERY_PATH("top_k of a long context is exact", TestTopKOfLongContext)

}  // namespace
}  // namespace sluice::kernels
