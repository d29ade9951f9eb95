// SelectUnion: exact selections of blocks at every level, and their unions.
#include "kernels/fluxion_segments.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Units = std::vector<int32_t>;

struct UnionRow {
  int32_t slot, position;
};

// Scores, levels and numbers of blocks of some rows. What LevelScores would not write is NaN, and
// what lies outside a row's cpu segment is infinite, so that a kernel that reads it is caught.
struct UnionInput {
  UnionInput(const std::vector<UnionRow>& of_rows, int32_t of_kv_heads, int32_t group,
             int32_t of_unit_tokens)
      : rows(static_cast<int32_t>(of_rows.size())),
        kv_heads(of_kv_heads),
        heads(of_kv_heads * group),
        unit_tokens(of_unit_tokens),
        slots(rows),
        positions(rows),
        levels(int64_t{rows} * kv_heads),
        blocks(int64_t{rows} * heads),
        scores(0) {
    for (int32_t r = 0; r < rows; ++r) {
      const UnionRow& row = of_rows[static_cast<size_t>(r)];
      slots[r] = row.slot;
      positions[r] = row.position;
      stride = std::max(stride, int64_t{EndBlock(SegmentsOf(row.position), 0)});
      slot_count = std::max(slot_count, row.slot + 1);
    }
    scores = Guarded<float>(rows * heads * stride);
    std::fill(scores.begin(), scores.end(), kInfinity);
    for (int32_t& count : blocks) count = 0;
  }

  FluxionSegments SegmentsOfRow(int64_t r) const { return SegmentsOf(positions[r]); }
  // Returns the score of a block of query head `head` of the row.
  float& Score(int64_t r, int64_t head, int64_t block) {
    return scores[(r * heads + head) * stride + block];
  }
  // Fills the scores of every head that selects some of its blocks.
  template <typename Draw>
  void FillScores(Draw draw) {
    const int32_t group = heads / kv_heads;
    for (int64_t h = 0; h < int64_t{rows} * heads; ++h) {
      const int64_t r = h / heads;
      const int32_t level = levels[h / group];
      if (level < 0) continue;
      const FluxionSegments segments = SegmentsOfRow(r);
      const bool is_read = blocks[h] > 0 && blocks[h] < CpuBlocks(segments, level);
      for (int32_t b = FirstBlock(segments, level); b < EndBlock(segments, level); ++b) {
        Score(r, h % heads, b) = is_read ? draw() : kNan;
      }
    }
  }

  // Returns the params of rows [first, first + count).
  SelectUnionParams Params(int32_t first, int32_t count, const UnitLists& selected,
                           SparseCounters* counters) const {
    return {scores.data() + int64_t{first} * heads * stride,
            stride,
            slots.data() + first,
            positions.data() + first,
            levels.data() + int64_t{first} * kv_heads,
            blocks.data() + int64_t{first} * heads,
            selected,
            counters,
            count,
            heads,
            kv_heads,
            unit_tokens};
  }
  // Returns how many units a list of the longest row may have.
  int32_t MostUnits() const {
    return static_cast<int32_t>(stride * LevelTokens(0) / unit_tokens) + 1;
  }

  int32_t rows, kv_heads, heads, unit_tokens;
  int64_t stride = 1;
  int32_t slot_count = 1;
  Guarded<int32_t> slots, positions, levels, blocks;
  Guarded<float> scores;
};

// The unions of some rows and what was counted, and how they are obtained.
struct Unions {
  Unions(const UnionInput& input, int64_t rows, int32_t capacity)
      : lists(rows * input.kv_heads, capacity), counters(input.slot_count) {
    for (SparseCounters& counter : counters) counter = {5, 1'000'000'000'000, 0, 0, 0, 0, 0, 0, 0};
  }

  void Run(const KernelTable& table, const UnionInput& input, int workers) {
    RunThreads(table.select_union, input.Params(0, input.rows, lists.view, counters.data()),
               workers);
    CHECK(lists.Damage() + counters.Damage() == "");
  }

  TestLists lists;
  Guarded<SparseCounters> counters;
};

// Checks that the path selects what the reference selects, with room for no more.
void CheckAgainstReference(const KernelTable& table, const UnionInput& input) {
  Unions want(input, input.rows, input.MostUnits());
  want.Run(Reference(), input, 1);
  const int64_t lists = int64_t{input.rows} * input.kv_heads;
  const int32_t capacity =
      std::max(*std::max_element(want.lists.counts.begin(), want.lists.counts.end()), 1);
  for (const int workers : {1, 3}) {
    Unions got(input, input.rows, capacity);
    got.Run(table, input, workers);
    for (int64_t list = 0; list < lists; ++list) {
      INFO("list " << list << " of " << lists << ", level " << input.levels[list]);
      REQUIRE(got.lists.List(list) == want.lists.List(list));
      const int32_t* const end = got.lists.units.data() + (list + 1) * capacity;
      REQUIRE(std::all_of(end - capacity + got.lists.counts[list], end,
                          [](int32_t unit) { return unit == -1; }));
    }
    CHECK(std::memcmp(got.counters.data(), want.counters.data(),
                      want.counters.span().size_bytes()) == 0);
  }
}

// One row with a cpu segment of tokens [64, 640), and one KV head with two query heads.
class OneList {
 public:
  OneList(const KernelTable& table, int32_t unit_tokens, int32_t level)
      : table_(table), input_({{2, 999}}, 1, 2, unit_tokens) {
    input_.levels[0] = level;
    input_.FillScores([] { return 0.0f; });
  }

  // Makes head `head` select `count` blocks, all of score `others` but those given.
  void Head(int64_t head, int32_t count, float others,
            std::initializer_list<std::pair<int32_t, float>> given) {
    const FluxionSegments segments = input_.SegmentsOfRow(0);
    input_.blocks[head] = count;
    for (int32_t b = FirstBlock(segments, input_.levels[0]);
         b < EndBlock(segments, input_.levels[0]); ++b) {
      input_.Score(0, head, b) = others;
    }
    for (const auto& [block, score] : given) input_.Score(0, head, block) = score;
  }
  // Returns the list, and checks what was counted.
  Units Selected() {
    Unions result(input_, 1, input_.MostUnits());
    result.Run(table_, input_, 2);
    const SparseCounters& counted = result.counters[2];
    CHECK(counted.steps == 6);
    CHECK(counted.selected ==
          1'000'000'000'000 + int64_t{result.lists.counts[0]} * input_.unit_tokens);
    CHECK(result.counters[0].steps == 5);
    return result.lists.List(0);
  }

 private:
  const KernelTable& table_;
  UnionInput input_;
};

Units From(int32_t first, int32_t end) {
  Units units(static_cast<size_t>(end - first));
  std::iota(units.begin(), units.end(), first);
  return units;
}

void TestByHand(const KernelTable& table, Random&) {
  {
    OneList list(table, 16, 0);  // blocks 4 to 39
    CHECK(list.Selected().empty());
    list.Head(0, 2, 0, {{5, 1.0f}, {7, 2.0f}});
    CHECK(list.Selected() == Units{5, 7});
    list.Head(1, 2, -5, {{39, -1.0f}, {7, -2.0f}});
    CHECK(list.Selected() == Units{5, 7, 39});
    // Among equals the lower ones are taken; -0 equals 0, and a NaN equals -inf.
    list.Head(0, 3, 0, {{4, -0.0f}, {20, 1.0f}});
    list.Head(1, 0, 0, {});
    CHECK(list.Selected() == Units{4, 5, 20});
    list.Head(0, 4, kNan, {{5, -kInfinity}, {30, -1e38f}, {31, kInfinity}});
    CHECK(list.Selected() == Units{4, 5, 30, 31});
    list.Head(0, 2, -kInfinity, {{4, kNan}});
    CHECK(list.Selected() == Units{4, 5});
    list.Head(0, 35, 3, {{17, kNan}});
    CHECK(list.Selected().size() == 35);
    // A head that selects all needs no scores, nor do the others of its list.
    for (const int32_t count : {36, 37, 1 << 30}) {
      list.Head(1, count, kNan, {});
      CHECK(list.Selected() == From(4, 40));
    }
  }
  {
    OneList list(table, 32, 2);  // blocks 1 to 9, of two units
    list.Head(0, 1, 0, {{1, 1.0f}});
    list.Head(1, 2, 0, {{9, 1.0f}, {4, 1.0f}});
    CHECK(list.Selected() == Units{2, 3, 8, 9, 18, 19});
  }
  {
    OneList list(table, 64, 2);
    list.Head(0, 3, 1, {{1, 0.0f}});
    CHECK(list.Selected() == Units{2, 3, 4});
  }
  // The first block of 128 tokens has the sink's units, which are left out.
  for (const int32_t unit_tokens : {16, 32, 64}) {
    OneList list(table, unit_tokens, 3);  // blocks 0 to 4
    const int32_t units = 128 / unit_tokens;
    list.Head(0, 1, 0, {{0, 1.0f}});
    CHECK(list.Selected() == From(units / 2, units));
    list.Head(1, 1, 0, {{1, 1.0f}});
    CHECK(list.Selected() == From(units / 2, 2 * units));
    list.Head(0, 1, 0, {{1, 1.0f}});
    CHECK(list.Selected() == From(units, 2 * units));
    list.Head(0, 5, 0, {});
    CHECK(list.Selected() == From(units / 2, 5 * units));
  }
  OneList without_level(table, 16, -1);
  CHECK(without_level.Selected().empty());
}
SLUICE_TEST_ON_EVERY_PATH("select_union joins what the heads select", TestByHand)
TEST_CASE("select_union joins what the heads select (reference)", "[kernels]") {
  OnPath("reference", TestByHand);
}

// Draws scores of every difficult kind: equal, one bit apart, of all magnitudes, NaN and infinite.
float AnyScore(uint64_t kind, Random& random) {
  switch (kind) {
    case 0:
      return 20 + 5 * NearlyNormal(random);
    case 1:
      return std::round(NearlyNormal(random) * 3);
    case 2:  // one bit apart, at random
      return __builtin_bit_cast(float, 0x3F800000u + static_cast<uint32_t>(random() % 40));
    case 3: {
      const float special[] = {kNan, -kInfinity, kInfinity, 0.0f, -0.0f, -kNan, 1e-42f, -1e-42f};
      return random() % 3 == 0 ? special[random() % 8] : NearlyNormal(random);
    }
    case 4:
      return random() % 2 == 0 ? kNan : -kInfinity;
    case 5:
      return -1.5f;
    default:  // any bits
      return __builtin_bit_cast(float, static_cast<uint32_t>(random()));
  }
}

// Draws levels of which some are -1, numbers of blocks and scores.
void Draw(UnionInput& input, Random& random) {
  const int32_t least_level = input.unit_tokens == 16 ? 0 : input.unit_tokens == 32 ? 1 : 2;
  const int32_t group = input.heads / input.kv_heads;
  for (int32_t& level : input.levels) {
    const auto choices = static_cast<uint64_t>(kFluxionLevels - least_level);
    level = random() % 6 == 0 ? -1 : least_level + static_cast<int32_t>(random() % choices);
  }
  for (int64_t list = 0; list < input.levels.size(); ++list) {
    if (input.levels[list] < 0) continue;
    const int32_t all = CpuBlocks(input.SegmentsOfRow(list / input.kv_heads), input.levels[list]);
    const int32_t some = static_cast<int32_t>(random() % static_cast<uint64_t>(all + 1));
    const int32_t choices[] = {0,   1,      some / 50, some / 10, some, std::max(all - 1, 0),
                               all, all + 3};
    const uint64_t count = random() % 3 == 0 ? 8 : 6;  // most lists have no head that selects all
    for (int32_t g = 0; g < group; ++g) {
      input.blocks[list * group + g] = choices[random() % count];
    }
  }
  const uint64_t kind = random() % 8;
  input.FillScores([&] { return AnyScore(kind < 7 ? kind : random() % 7, random); });
}

void TestAgainstReference(const KernelTable& table, Random& random) {
  for (int i = 0; i < 240; ++i) {
    const int32_t unit_tokens = 16 << (i % 3), group = std::vector{1, 3, 4, 7, 2, 8, 12}[i / 3 % 7];
    const auto kv_heads = static_cast<int32_t>(1 + random() % 3);
    const uint64_t longest = std::vector{320, 2000, 9000, 40000}[random() % 4];
    std::vector<UnionRow> rows;
    for (const int32_t slot : {1, -1, 0, 5, 2}) {
      rows.push_back({slot, static_cast<int32_t>(random() % longest)});
    }
    UnionInput input(rows, kv_heads, group, unit_tokens);
    Draw(input, random);
    INFO("case " << i << ": group " << group << ", units of " << unit_tokens);
    CheckAgainstReference(table, input);
  }
}
SLUICE_TEST_ON_EVERY_PATH("select_union agrees with the reference, whatever the scores are",
                          TestAgainstReference)

// Rows whose cpu segment is empty or short, at every length.
void TestShortRows(const KernelTable& table, Random& random) {
  for (int32_t first = 0; first < 1200; first += 30) {
    std::vector<UnionRow> rows;
    for (int32_t i = 0; i < 30; ++i) rows.push_back({i, first + i});
    UnionInput input(rows, 2, 2, 16 << (random() % 3));
    Draw(input, random);
    CheckAgainstReference(table, input);
  }
}
SLUICE_TEST_ON_EVERY_PATH("select_union selects from rows of every short length", TestShortRows)

void TestLongRows(const KernelTable& table, Random& random) {
  for (const int32_t tokens : {1 << 17, 1 << 19, 1 << 20}) {
    for (const uint64_t kind : {0, 1, 3, 6}) {
      const std::vector<UnionRow> rows = {{1, tokens - 1}, {-1, tokens - 1}, {0, tokens / 3}};
      UnionInput input(rows, 1, 3, 16);
      for (int64_t list = 0; list < input.levels.size(); ++list) {
        input.levels[list] = list < 2 ? 0 : 1;
        const int32_t all = CpuBlocks(input.SegmentsOfRow(list), input.levels[list]);
        input.blocks[3 * list] = all / 20;
        input.blocks[3 * list + 1] = static_cast<int32_t>(random() % static_cast<uint64_t>(all));
        input.blocks[3 * list + 2] = 3;
      }
      input.FillScores([&] { return AnyScore(kind, random); });
      CheckAgainstReference(table, input);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("select_union selects from rows of up to 2^20 tokens", TestLongRows)

// A row's list does not depend on the other rows, and counters may be absent.
void TestRowsAlone(const KernelTable& table, Random& random) {
  for (int i = 0; i < 10; ++i) {
    std::vector<UnionRow> rows;
    for (int32_t slot = 0; slot < 6; ++slot) {
      rows.push_back({slot == 4 ? -1 : slot, static_cast<int32_t>(random() % 6000)});
    }
    UnionInput input(rows, 2, 4, 16);
    Draw(input, random);
    Unions together(input, input.rows, input.MostUnits());
    together.Run(table, input, 3);
    for (int32_t r = 0; r < input.rows; ++r) {
      Unions alone(input, 1, input.MostUnits());
      RunWorkers(table.select_union, input.Params(r, 1, alone.lists.view, nullptr), 1);
      CHECK(alone.lists.Damage() == "");
      for (int32_t h = 0; h < input.kv_heads; ++h) {
        CHECK(alone.lists.List(h) == together.lists.List(int64_t{r} * input.kv_heads + h));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("select_union selects the same for a row alone", TestRowsAlone)

}  // namespace
}  // namespace sluice::kernels
