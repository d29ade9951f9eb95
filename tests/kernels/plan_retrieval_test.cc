// PlanRetrieval: at which size of blocks a list selects, and how many.
#include "tests/kernels/budgets_support.h"

namespace sluice::kernels {
namespace {

struct TestPlan {
  TestPlan(int64_t rows, int64_t heads, int64_t kv_heads)
      : levels(rows * kv_heads), blocks(rows * heads), volumes(rows * kv_heads) {}
  std::string Damage() const { return levels.Damage() + blocks.Damage() + volumes.Damage(); }
  Guarded<int32_t> levels, blocks, volumes;
};

// Rows with given budgets, at positions of every kind.
struct PlanInput {
  static constexpr int32_t kRows = 11;

  PlanInput(int32_t group, int32_t of_kv_heads, Random& random)
      : kv_heads(of_kv_heads),
        heads(group * of_kv_heads),
        slots(BufferOf<int32_t>({1, 2, -1, 0, 5, 3, -1, 7, 8, 6, 4})),
        positions(BufferOf<int32_t>({447, 1048575, 900, 0, 319, 446, 0, 4095, 5000, 33333, 574})),
        budgets(int64_t{kRows} * heads * kFluxionLevels),
        streaming(int64_t{kRows} * heads) {
    FillUniform(budgets.data(), budgets.size(), 0, 0.5f, random);
    const float special[] = {kNan, 1.5f, 1, -0.25f, 0, -0.0f, 1e-7f, 0.9999999f, kInfinity};
    for (float& budget : budgets) {
      if (random() % 8 == 0) budget = special[random() % std::size(special)];
    }
    // Some lists stream as a whole; else a head does or not.
    for (int64_t list = 0; list < int64_t{kRows} * kv_heads; ++list) {
      const uint64_t kind = random() % 4;
      for (int64_t h = list * group; h < (list + 1) * group; ++h) {
        streaming[h] = kind == 0 ? 1 : kind == 1 ? 0 : static_cast<int32_t>(random() % 2);
      }
    }
  }

  PlanRetrievalParams Params(int32_t first_level, TestPlan& to,
                             int32_t last_level = kFluxionLevels - 1) {
    return {.budgets = budgets.data(),
            .streaming = streaming.data(),
            .slots = slots.data(),
            .positions = positions.data(),
            .levels = to.levels.data(),
            .blocks = to.blocks.data(),
            .volumes = to.volumes.data(),
            .rows = kRows,
            .heads = heads,
            .kv_heads = kv_heads,
            .first_level = first_level,
            .last_level = last_level};
  }

  int32_t kv_heads, heads;
  Guarded<int32_t> slots, positions;
  Guarded<float> budgets;
  Guarded<int32_t> streaming;
};

// Holds a list's plan to all plans that it could have.
void CheckList(const PlanInput& in, int64_t list, int32_t first_level, int32_t last_level,
               const TestPlan& plan) {
  const int64_t row = list / in.kv_heads, group = in.heads / in.kv_heads;
  const bool padded = in.slots[row] < 0;
  const FluxionSegments segments = SegmentsOf(padded ? 0 : in.positions[row]);
  const auto blocks_of = [&](int64_t h, int32_t level) -> int64_t {
    const float budget = in.budgets[h * kFluxionLevels + level];
    return in.streaming[h] != 0 ? 0 : BlocksOfShare(segments, level, budget);
  };
  bool has_level = false;
  for (int64_t h = list * group; h < (list + 1) * group; ++h) has_level |= in.streaming[h] == 0;
  has_level = has_level && !padded && segments.local > segments.sink;
  const int32_t level = plan.levels[list];
  INFO("row " << row << " list " << list << " level " << level);
  REQUIRE((level >= 0) == has_level);
  if (!has_level) {
    CHECK(plan.volumes[list] == 0);
    for (int64_t h = list * group; h < (list + 1) * group; ++h) CHECK(plan.blocks[h] == 0);
    return;
  }
  REQUIRE(level >= first_level);
  REQUIRE(level <= last_level);
  for (int32_t other = first_level; other <= last_level; ++other) {
    int64_t volume = CpuBlocks(segments, other);
    for (int64_t h = list * group; h < (list + 1) * group; ++h) {
      volume += blocks_of(h, other) * LevelTokens(other);
    }
    if (other == level) CHECK(plan.volumes[list] == volume);
    if (other < level) CHECK(plan.volumes[list] < volume);
    if (other > level) CHECK(plan.volumes[list] <= volume);
  }
  for (int64_t h = list * group; h < (list + 1) * group; ++h) {
    CHECK(plan.blocks[h] == blocks_of(h, level));
  }
}

void TestPlans(const KernelTable& table, Random& random) {
  for (const int32_t group : {1, 3, 4, 7, 40}) {
    for (const int32_t kv_heads : {1, 2, 8}) {
      for (const int32_t first_level : {0, 1, 2, 3}) {
        const auto last_level =
            first_level + static_cast<int32_t>(random() % (kFluxionLevels - first_level));
        INFO("group " << group << ", " << kv_heads << " KV heads, levels " << first_level << " to "
                      << last_level);
        PlanInput in(group, kv_heads, random);
        TestPlan got(in.kRows, in.heads, kv_heads), want(in.kRows, in.heads, kv_heads);
        RunWorkers(Reference().plan_retrieval, in.Params(first_level, want, last_level), 2);
        RunThreads(table.plan_retrieval, in.Params(first_level, got, last_level), 3);
        CHECK(got.Damage() + want.Damage() == "");
        for (int64_t list = 0; list < int64_t{in.kRows} * kv_heads; ++list) {
          CheckList(in, list, first_level, last_level, want);
        }
        CHECK(BitDifference(got.levels.span(), want.levels.span(), kv_heads) == "");
        CHECK(BitDifference(got.blocks.span(), want.blocks.span(), in.heads) == "");
        CHECK(BitDifference(got.volumes.span(), want.volumes.span(), kv_heads) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a plan has the least volume", TestPlans)

// 4096 tokens: the cpu segment is [64, 3840), which is 236, 118, 59 and 30 blocks.
void TestPlanByHand(const KernelTable& table, Random& random) {
  PlanInput in(2, 1, random);
  struct Case {
    float budgets[2][kFluxionLevels];
    int32_t streaming[2];
    int32_t first_level, level, blocks[2], volume;
  };
  const Case cases[] = {
      // 48 blocks of 16 each: 236 + 2 * 768. Those of 128 are 8 each: 30 + 2 * 1024.
      {{{0.2f, 0.3f, 0.3f, 0.25f}, {0.2f, 0.3f, 0.3f, 0.25f}}, {0, 0}, 0, 0, {48, 48}, 1772},
      {{{0.2f, 0.3f, 0.3f, 0.25f}, {0.2f, 0.3f, 0.3f, 0.25f}}, {0, 0}, 1, 3, {8, 8}, 2078},
      // One head alone counts; nothing is nothing at every size, so the least digests win.
      {{{0.2f, 0.3f, 0.3f, 0.25f}, {1, 1, 1, 1}}, {0, 1}, 0, 0, {48, 0}, 1004},
      {{{0, 0, 0, 0}, {-1, -1, -1, -1}}, {0, 0}, 0, 3, {0, 0}, 30},
      {{{kNan, kNan, kNan, kNan}, {2, 1, 3, 1}}, {0, 0}, 0, 2, {59, 59}, 7611},
      {{{0, 0, 0, 0}, {0, 0, 0, 0}}, {1, 1}, 0, -1, {0, 0}, 0},
  };
  for (const Case& c : cases) {
    const int64_t row = 7, first = row * in.heads;
    std::copy_n(c.budgets[0], 2 * kFluxionLevels, in.budgets.data() + first * kFluxionLevels);
    std::copy_n(c.streaming, 2, in.streaming.data() + first);
    for (const KernelTable* path : {&Reference(), &table}) {
      TestPlan plan(in.kRows, in.heads, 1);
      RunWorkers(path->plan_retrieval, in.Params(c.first_level, plan), 1);
      CHECK(plan.levels[row] == c.level);
      CHECK(plan.blocks[first] == c.blocks[0]);
      CHECK(plan.blocks[first + 1] == c.blocks[1]);
      CHECK(plan.volumes[row] == c.volume);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("plans worked out by hand", TestPlanByHand)

}  // namespace
}  // namespace sluice::kernels
