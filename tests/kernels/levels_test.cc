// Fluxion's digests at four levels, and the bounds of blocks by them.
#include "kernels/fluxion_params.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

// As SLUICE_TEST_ON_EVERY_PATH, with a tag of this file's cases.
#define SLUICE_TEST_LEVELS(claim, test)                                                 \
  TEST_CASE(claim " (portable)", "[kernels][levels]") { OnPath("portable", test); }     \
  TEST_CASE(claim " (avx2)", "[kernels][levels]") { OnPath("avx2", test); }             \
  TEST_CASE(claim " (avx512bf16)", "[kernels][levels]") { OnPath("avx512bf16", test); } \
  TEST_CASE(claim " (amx)", "[kernels][levels]") { OnPath("amx", test); }               \
  TEST_CASE(claim " (cuda)", "[kernels][levels][cuda]") { OnPath("cuda", test); }

int32_t Pick(Random& random, int32_t from, int32_t to) {
  return from + static_cast<int32_t>(random() % static_cast<uint64_t>(to - from + 1));
}

// Digests of all levels. They start as all-ones bytes.
template <typename T>
struct TestLevels {
  TestLevels(int32_t slots, int32_t tokens, int32_t head_dim, int32_t kv_heads, Random& random) {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      of.emplace_back(slots, tokens / LevelTokens(level), Pick(random, 1, 9), 2 * head_dim,
                      kv_heads, random);
      view.of[level] = of.back().view;
    }
  }
  // Fills rows with sorted bounds, and what lies between them with 0.
  void Fill(int32_t slots, int32_t tokens, Random& random) {
    for (size_t level = 0; level < of.size(); ++level) {
      TestRows<T>& rows = of[level];
      std::fill_n(rows.data.data(), rows.data.size(), T{});
      const int64_t dim = rows.view.dim / 2;
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t b = 0; b < tokens / LevelTokens(static_cast<int32_t>(level)); ++b) {
          for (int64_t h = 0; h < rows.view.kv_heads; ++h) {
            T* const row = rows.Row(slot, b, h);
            FillNormal(std::span<T>(row, static_cast<size_t>(2 * dim)), random);
            for (int64_t d = 0; d < dim; ++d) {
              if (Value(row[d]) > Value(row[dim + d])) std::swap(row[d], row[dim + d]);
            }
          }
        }
      }
    }
  }

  std::vector<TestRows<T>> of;
  LevelDigests view;
};

// Buffers of the same shape elsewhere, and the view of them.
template <typename T>
struct LevelCopies {
  explicit LevelCopies(const TestLevels<T>& levels) {
    for (size_t level = 0; level < levels.of.size(); ++level) {
      data.emplace_back(levels.of[level].data.size());
      view.of[level] = levels.of[level].At(data.back());
    }
  }
  std::string DifferenceFrom(const TestLevels<T>& want) const {
    for (size_t level = 0; level < data.size(); ++level) {
      const std::string difference =
          data[level].Damage() +
          BitDifference(data[level].span(), want.of[level].data.span(), want.view.of[level].dim);
      if (!difference.empty()) return "level " + std::to_string(level) + ": " + difference;
    }
    return "";
  }

  std::vector<Guarded<T>> data;
  LevelDigests view;
};

struct DigestsCase {
  const char* name;
  int32_t block_tokens, kv_heads, head_dim;
  int32_t ring_blocks;  // if > 0, rows are decode rows
  bool bulk;            // rows name their first positions
};

const DigestsCase kDigestsCases[] = {
    {"decode rows", 32, 3, 64, 0, false},
    {"decode rows in a ring", 32, 2, 128, 5, false},
    {"decode rows in a ring of blocks of 16", 16, 1, 16, 11, false},
    {"decode rows in a ring of blocks of 64", 64, 2, 80, 3, false},
    {"whole sequences", 32, 2, 64, 0, true},
    {"whole sequences, blocks of 48", 48, 1, 16, 0, true},
    {"whole sequences, blocks of 128, head_dim 256", 128, 1, 256, 0, true},
    {"whole sequences, blocks of 16", 16, 2, 128, 0, true},
};

constexpr int32_t kSlots = 6, kTokens = 1024;

// Checks by hand one digest of the reference.
template <typename T>
void CheckOneDigest(TestCache<T>& cache, TestLevels<T>& levels, int32_t level, int64_t slot,
                    int64_t block, int64_t begin) {
  const int64_t dim = cache.view.head_dim, head = cache.view.kv_heads - 1;
  const T* const digest = levels.of[static_cast<size_t>(level)].Row(slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    double least = 1e30, largest = -1e30;
    for (int64_t t = begin; t < (block + 1) * LevelTokens(level); ++t) {
      least = std::min(least, Value(cache.Key(slot, t, head)[d]));
      largest = std::max(largest, Value(cache.Key(slot, t, head)[d]));
    }
    REQUIRE(Value(digest[d]) == least);
    REQUIRE(Value(digest[dim + d]) == largest);
  }
}

template <typename T>
void CheckDigests(const KernelTable& table, const DigestsCase& c, Random& random) {
  INFO(c.name << ", " << sizeof(T) << " bytes an element");
  TestCache<T> cache(kSlots, kTokens / c.block_tokens + 1, c.block_tokens, c.kv_heads, c.head_dim,
                     random, c.ring_blocks);
  cache.Fill(random);
  // The digests are exact also where floats are denormal: nothing may be flushed.
  FillNormal(std::span<T>(cache.Key(1, 130, 0), static_cast<size_t>(c.head_dim)), random, 1e-39f);
  TestLevels<T> want(kSlots, kTokens, c.head_dim, c.kv_heads, random);
  // Rows that complete the first chunk and a later one, that lie just beside the end of a chunk,
  // and that are shorter than the sink.
  const auto slots = BufferOf<int32_t>({3, 0, -1, 1, 4, -1, 2, 5});
  const auto positions =
      BufferOf<int32_t>({127, 126, 255, 7 * 128 - 1, 7 * 128, 0, Pick(random, 2, 6) * 128 - 1, 63});
  // These rows begin before, at and behind the end of a chunk, and where there is none.
  const auto first = BufferOf<int32_t>({127, 0, 0, 128, 2 * 128 - 1, 0, Pick(random, 0, 255), 63});
  LevelDigestsParams p = {
      cache.view, want.view, slots.data(), c.bulk ? first.data() : nullptr, positions.data(), 8};
  RunWorkers(Reference().level_digests, p, 1);
  for (int workers : {1, 3, 7}) {
    LevelCopies<T> got(want);
    p.digests = got.view;
    RunThreads(table.level_digests, p, workers);
    CHECK(got.DifferenceFrom(want) == "");
  }
  // The reference's own: the sink has no digest, the first large block has the other tokens, and
  // a chunk that is not complete has none.
  CheckOneDigest(cache, want, 3, 3, 0, 64);
  CheckOneDigest(cache, want, 2, 3, 1, 64);
  CheckOneDigest(cache, want, 0, 1, 55, 55 * 16);
  CheckOneDigest(cache, want, 1, 1, 26, 26 * 32);
  const Guarded<T> untouched(2 * c.head_dim);
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    auto& rows = want.of[static_cast<size_t>(level)];
    const auto is_untouched = [&](int64_t slot, int64_t block) {
      return std::memcmp(rows.Row(slot, block, 0), untouched.data(),
                         2 * static_cast<size_t>(c.head_dim) * sizeof(T)) == 0;
    };
    if (level < 3) REQUIRE(is_untouched(3, 0));
    REQUIRE(is_untouched(4, 7 * 128 / LevelTokens(level)));
    REQUIRE(is_untouched(0, 64 / LevelTokens(level)));
    REQUIRE(is_untouched(4, 6 * 128 / LevelTokens(level)) != c.bulk);
  }
}

void TestDigests(const KernelTable& table, Random& random) {
  for (const DigestsCase& c : kDigestsCases) {
    CheckDigests<uint16_t>(table, c, random);
    CheckDigests<float>(table, c, random);
  }
}
SLUICE_TEST_LEVELS("level digests are exact, and leave out the sink and what is not complete",
                   TestDigests)

// A sequence grows token by token in a ring of 256 + 128 tokens; its digests are those of its whole
// cache.
void TestDigestsGrow(const KernelTable& table, Random& random) {
  constexpr int32_t kLast = 700, kHeads = 2, kDim = 32;
  TestCache<uint16_t> whole(1, kTokens / 32, 32, kHeads, kDim, random);
  TestCache<uint16_t> ring(1, 12, 32, kHeads, kDim, random, 12);
  whole.Fill(random);
  TestLevels<uint16_t> want(1, kTokens, kDim, kHeads, random);
  LevelCopies<uint16_t> grown(want);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  auto positions = BufferOf<int32_t>({kLast});
  RunWorkers(
      table.level_digests,
      LevelDigestsParams{whole.view, want.view, slots.data(), first.data(), positions.data(), 1},
      3);
  for (int32_t t = 0; t <= kLast; ++t) {
    for (int32_t h = 0; h < kHeads; ++h) std::copy_n(whole.Key(0, t, h), kDim, ring.Key(0, t, h));
    positions[0] = t;
    RunWorkers(
        table.level_digests,
        LevelDigestsParams{ring.view, grown.view, slots.data(), nullptr, positions.data(), 1}, 1);
  }
  CHECK(grown.DifferenceFrom(want) == "");
}
SLUICE_TEST_LEVELS("level digests extended token by token in a ring are those of the whole",
                   TestDigestsGrow)

// A digest of keys some of which are NaN is that of the others.
template <typename T>
void CheckDigestsOfNaNs(const KernelTable& table, Random& random) {
  TestCache<T> cache(1, 8, 32, 1, 64, random);
  cache.Fill(random);
  T nan;
  std::memset(&nan, 0xFF, sizeof(T));
  for (int i = 0; i < 2000; ++i) {
    cache.Key(0, Pick(random, 0, 255), 0)[Pick(random, 0, 63)] = nan;
  }
  for (int64_t t = 80; t < 96; ++t) cache.Key(0, t, 0)[5] = nan;
  TestLevels<T> want(1, 256, 64, 1, random);
  LevelCopies<T> got(want);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  const auto positions = BufferOf<int32_t>({255});
  LevelDigestsParams p = {cache.view, want.view, slots.data(), first.data(), positions.data(), 1};
  RunWorkers(Reference().level_digests, p, 1);
  p.digests = got.view;
  RunWorkers(table.level_digests, p, 1);
  CHECK(got.DifferenceFrom(want) == "");
  CHECK(Value(want.of[0].Row(0, 5, 0)[5]) == std::numeric_limits<double>::infinity());
}

void TestDigestsOfNaNs(const KernelTable& table, Random& random) {
  CheckDigestsOfNaNs<uint16_t>(table, random);
  CheckDigestsOfNaNs<float>(table, random);
}
SLUICE_TEST_LEVELS("level digests ignore NaNs", TestDigestsOfNaNs)

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

template <typename T>
void CheckLevelScores(const KernelTable& table, int32_t group, int32_t head_dim, int32_t tokens,
                      Random& random) {
  constexpr int32_t kKvHeads = ScoresInput::kKvHeads, kScoreSlots = 8;
  INFO("group " << group << " head_dim " << head_dim << " tokens " << tokens << ", " << sizeof(T)
                << " bytes an element");
  const ScoresInput in(group, head_dim, tokens, random);
  TestLevels<T> digests(kScoreSlots, tokens, head_dim, kKvHeads, random);
  digests.Fill(kScoreSlots, tokens, random);
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
                         .heads = in.heads};
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
  for (int32_t group : {1, 3, 4, 7, 8}) {
    CheckLevelScores<uint16_t>(table, group, 64, 1280, random);
    CheckLevelScores<float>(table, group, 16, 1024, random);
  }
  for (int32_t head_dim : {16, 80, 128, 256}) {
    CheckLevelScores<uint16_t>(table, 5, head_dim, 2048, random);
  }
  CheckLevelScores<float>(table, 4, 128, 1280, random);
  CheckLevelScores<uint16_t>(table, 12, 64, 1280, random);
  CheckLevelScores<uint16_t>(table, 4, 64, 20480, random);
}
SLUICE_TEST_LEVELS("level scores agree with the reference, and are a row's own", TestLevelScores)

// A head's scores have the same bits whichever other heads of its group want some.
void TestHeadsAlone(const KernelTable& table, Random& random) {
  constexpr int32_t kGroup = 7, kDim = 128, kAll = 2048;
  TestLevels<uint16_t> digests(1, kAll, kDim, 1, random);
  digests.Fill(1, kAll, random);
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
        kGroup};
    RunWorkers(table.level_scores, p, 1);
    p.scores = alone.data();
    for (int32_t h = 0; h < kGroup; ++h) {
      for (int32_t other = 0; other < kGroup; ++other) blocks[other] = other == h ? 1 : 0;
      RunWorkers(table.level_scores, p, 3);
    }
    CHECK(BitDifference(alone.span(), together.span(), stride) == "");
  }
}
SLUICE_TEST_LEVELS("level scores of a head do not depend on which heads want some", TestHeadsAlone)

// A caller with one list can ask for a part of it.
TEST_CASE("a worker scores its share of the blocks of a list, on every path of the CPU",
          "[kernels][levels]") {
  constexpr int32_t kGroup = 3, kDim = 32, kAll = 2100, kWorkers = 5;
  constexpr int64_t kStride = kAll / 16 + 1;
  Random random(TestSeed());
  TestLevels<uint16_t> digests(1, kAll, kDim, 2, random);
  digests.Fill(1, kAll, random);
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
        const LevelScoresParams p = {
            q.data(),      2 * kGroup * kDim, slots.data(),  positions.data(), digests.view,
            levels.data(), blocks.data(),     scores.data(), kStride,          1,
            2 * kGroup};
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
