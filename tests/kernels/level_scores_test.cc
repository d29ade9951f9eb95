// Scores of blocks by Fluxion's digests.
#include "tests/kernels/levels_support.h"

namespace sluice::kernels {
namespace {

// Rows of every length that matters, and a level and numbers of blocks for each list.
struct ScoresInput {
  static constexpr int32_t kRows = 9, kKvHeads = 2;

  ScoresInput(int32_t of_group, int32_t head_dim, int32_t tokens, Random& random)
      : group(of_group),
        heads(kKvHeads * group),
        q_stride(int64_t{heads} * head_dim + 5),
        slots(BufferOf<int32_t>({2, -1, 0, 7, 1, 3, 6, 5, 4})),
        // Rows of 319, 320 and 383 tokens have no cpu segment, and those of 384 and 448 have one
        // of 64.
        positions(BufferOf<int32_t>(
            {0, 500, 318, 319, 382, 383, 447, Pick(random, 511, tokens - 1), tokens - 1})),
        levels(kRows * kKvHeads),
        blocks(kRows * heads),
        q(NormalBuffer<float>(kRows * q_stride, random, 2.0f)) {
    for (int32_t& level : levels) level = Pick(random, -1, kFluxionLevels - 1);
    for (int64_t i = 0; i < blocks.size(); ++i) {
      const int64_t row = i / heads;
      const int32_t level = std::max(levels[i / group], 0);
      const int32_t all = slots[row] < 0 ? 9 : CpuBlocks(SegmentsOf(positions[row]), level);
      const int32_t kind = Pick(random, 0, 4);
      blocks[i] = kind == 0 ? 0 : kind == 1 ? all : Pick(random, 0, all);
    }
    // The longest list has scores of every head but one, so that some are always compared.
    levels[levels.size() - 1] = 0;
    for (int64_t i = blocks.size() - group; i < blocks.size(); ++i) blocks[i] = 1;
    if (group > 1) blocks[blocks.size() - Pick(random, 1, group)] = 0;
  }

  const int32_t group, heads;
  const int64_t q_stride;
  const Guarded<int32_t> slots, positions;
  Guarded<int32_t> levels, blocks;
  const Guarded<float> q;
};

// Runs the rows of `all` one by one, into the same scores.
void RunRowsAlone(const KernelTable& table, const LevelScoresParams& all, int32_t kv_heads) {
  for (int64_t r = 0; r < all.rows; ++r) {
    LevelScoresParams p = all;
    p.rows = 1;
    p.q = all.q + r * all.q_stride;
    p.slots = all.slots + r;
    p.positions = all.positions + r;
    p.levels = all.levels + r * kv_heads;
    p.blocks = all.blocks + r * all.heads;
    p.scores = all.scores + r * all.heads * all.score_stride;
    RunWorkers(table.level_scores, p, 2);
  }
}

void CheckLevelScores(const KernelTable& table, int32_t group, int32_t head_dim, int32_t tokens,
                      DigestsOf of, Random& random) {
  constexpr int32_t kKvHeads = ScoresInput::kKvHeads, kScoreSlots = 8;
  INFO("group " << group << " head_dim " << head_dim << " tokens " << tokens << ", " << Name(of));
  const ScoresInput in(group, head_dim, tokens, random);
  TestLevels digests(kScoreSlots, tokens, head_dim, kKvHeads, random, of);
  digests.Fill(random);
  const int64_t stride = tokens / LevelTokens(0) + 3, size = in.kRows * in.heads * stride;
  LevelScoresParams p = {.q = in.q.data(),
                         .q_stride = in.q_stride,
                         .slots = in.slots.data(),
                         .positions = in.positions.data(),
                         .digests = digests.view,
                         .levels = in.levels.data(),
                         .blocks = in.blocks.data(),
                         .scores = nullptr,
                         .score_stride = stride,
                         .rows = in.kRows,
                         .heads = in.heads,
                         .head_dim = head_dim};
  Guarded<float> want(size);
  p.scores = want.data();
  RunWorkers(Reference().level_scores, p, 1);
  double largest = 0;
  for (float v : want)
    largest = std::isfinite(v) ? std::max<double>(largest, std::fabs(v)) : largest;
  REQUIRE(largest > 0);
  Guarded<float> first(size);
  for (int workers : {1, 3, 11}) {
    Guarded<float> got(size);
    p.scores = got.data();
    RunThreads(table.level_scores, p, workers);
    CHECK(got.Damage() == "");
    CHECK(Difference(got.span(), want.span(), 2e-6, stride, largest / 20) == "");
    if (workers == 1) first = CopyOf(got);
    CHECK(BitDifference(got.span(), first.span(), stride) == "");
    for (int64_t i = 0; i < size; ++i) REQUIRE(std::isnan(got[i]) == std::isnan(want[i]));
  }
  Guarded<float> alone(size);
  p.scores = alone.data();
  RunRowsAlone(table, p, kKvHeads);
  CHECK(BitDifference(alone.span(), first.span(), stride) == "");
}

void TestLevelScores(const KernelTable& table, Random& random) {
  for (const DigestsOf of : kAllDigests) {
    for (int32_t group : {1, 3, 4, 7, 8}) {
      CheckLevelScores(table, group, 64, 1280, of, random);
      CheckLevelScores(table, group, 16, 1024, of, random);
    }
    for (int32_t head_dim : {16, 80, 128, 256}) {
      CheckLevelScores(table, 5, head_dim, 2048, of, random);
    }
    CheckLevelScores(table, 12, 64, 1280, of, random);
    CheckLevelScores(table, 4, 64, 20480, of, random);
  }
}
SLUICE_TEST_LEVELS("level scores agree with the reference, and are a row's own", TestLevelScores)

// A head's scores have the same bits whichever other heads of its group want some.
void CheckHeadsAlone(const KernelTable& table, DigestsOf of, Random& random) {
  INFO(Name(of));
  constexpr int32_t kGroup = 7, kDim = 128, kAll = 2048;
  TestLevels digests(1, kAll, kDim, 1, random, of);
  digests.Fill(random);
  const auto q = NormalBuffer<float>(kGroup * kDim, random);
  const auto slots = BufferOf<int32_t>({0}), positions = BufferOf<int32_t>({kAll - 1});
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    const auto levels = BufferOf<int32_t>({level});
    const int64_t stride = kAll / 16;
    auto blocks = BufferOf<int32_t>({1, 1, 1, 1, 1, 1, 1});
    Guarded<float> together(kGroup * stride), alone(kGroup * stride);
    LevelScoresParams p = {
        q.data(),      kGroup * kDim, slots.data(),    positions.data(), digests.view,
        levels.data(), blocks.data(), together.data(), stride,           1,
        kGroup,        kDim};
    RunWorkers(table.level_scores, p, 1);
    p.scores = alone.data();
    for (int32_t h = 0; h < kGroup; ++h) {
      for (int32_t other = 0; other < kGroup; ++other) blocks[other] = other == h ? 1 : 0;
      RunWorkers(table.level_scores, p, 3);
    }
    CHECK(BitDifference(alone.span(), together.span(), stride) == "");
  }
}

void TestHeadsAlone(const KernelTable& table, Random& random) {
  for (const DigestsOf of : kAllDigests) CheckHeadsAlone(table, of, random);
}
SLUICE_TEST_LEVELS("level scores of a head do not depend on which heads want some", TestHeadsAlone)

// A caller with one list can ask for a part of it.
TEST_CASE("a worker scores its share of the blocks of a list, on every path of the CPU",
          "[kernels][levels]") {
  constexpr int32_t kGroup = 3, kDim = 32, kAll = 2100, kWorkers = 5;
  constexpr int64_t kStride = kAll / 16 + 1;
  const DigestsOf of = GENERATE(from_range(std::begin(kAllDigests), std::end(kAllDigests)));
  INFO(Name(of));
  Random random(TestSeed());
  TestLevels digests(1, kAll, kDim, 2, random, of);
  digests.Fill(random);
  const auto q = NormalBuffer<float>(2 * kGroup * kDim, random);
  const auto slots = BufferOf<int32_t>({0}), positions = BufferOf<int32_t>({kAll - 1});
  const FluxionSegments segments = SegmentsOf(kAll - 1);
  std::vector<const KernelTable*> tables = AvailableKernelTables();
  tables.push_back(&Reference());
  for (const KernelTable* table : tables) {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      // The first list has no level, and one head of the second wants all blocks.
      const auto levels = BufferOf<int32_t>({-1, level});
      const int32_t all = CpuBlocks(segments, level), first = FirstBlock(segments, level);
      const auto blocks = BufferOf<int32_t>({1, 1, 1, 1, all, 2});
      for (int worker = 0; worker < kWorkers; ++worker) {
        INFO(table->name << ", level " << level << ", worker " << worker);
        Guarded<float> scores(2 * kGroup * kStride);
        const LevelScoresParams p = {q.data(),      2 * kGroup * kDim,
                                     slots.data(),  positions.data(),
                                     digests.view,  levels.data(),
                                     blocks.data(), scores.data(),
                                     kStride,       1,
                                     2 * kGroup,    kDim};
        table->level_scores(p, {worker, kWorkers});
        for (int64_t i = 0; i < scores.size(); ++i) {
          const int64_t head = i / kStride, block = i % kStride - first;
          const bool mine = block >= all * worker / kWorkers &&
                            block < all * (worker + 1) / kWorkers && (head == 3 || head == 5);
          REQUIRE(std::isnan(scores[i]) != mine);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels
