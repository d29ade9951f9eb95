// Fluxion's digests at four levels.
#include "tests/kernels/levels_support.h"

namespace sluice::kernels {
namespace {

// Returns whether an element of a digest may stand in place of the reference's. A mean of float32
// sums may be off by 1e-6 of the keys' magnitudes, which are at most 70 here, and be rounded to the
// other neighbour for it.
bool IsNear(uint8_t got, uint8_t want) {
  const double off = std::fabs(E4M3ToFloat(got) - E4M3ToFloat(want));
  const double step = std::max(0x1p-9f, std::fabs(E4M3ToFloat(want)) / 8);
  return got == want || off <= step;
}

// Buffers of the same shape elsewhere, and the view of them.
struct LevelCopies {
  explicit LevelCopies(const TestLevels& levels) {
    for (size_t level = 0; level < levels.of.size(); ++level) {
      data.emplace_back(levels.of[level].data.size());
      if (levels.view.of[level].base != nullptr) {
        view.of[level] = levels.of[level].At(data.back());
      }
    }
  }
  uint8_t* Row(int32_t level, int64_t slot, int64_t block, int64_t head) {
    return data[static_cast<size_t>(level)].data() + RowOffset(view.of[level], slot, block, head);
  }
  // Returns an empty string where the bits are equal.
  std::string DifferenceFrom(const TestLevels& want) const {
    for (size_t level = 0; level < data.size(); ++level) {
      const std::string difference =
          data[level].Damage() +
          BitDifference(data[level].span(), want.of[level].data.span(), want.of[level].view.dim);
      if (!difference.empty()) return "level " + std::to_string(level) + ": " + difference;
    }
    return "";
  }
  // Makes elements that are near those of `want` equal to them. Returns the share of those that
  // were not.
  double TakeNear(TestLevels& want) {
    int64_t differ = 0, all = 0;
    want.ForEachRow([&](int32_t level, int64_t slot, int64_t block, int64_t head) {
      uint8_t* const got = Row(level, slot, block, head);
      const uint8_t* const of_want = want.of[static_cast<size_t>(level)].Row(slot, block, head);
      for (int64_t d = 0; d < want.view.of[level].dim; ++d) {
        ++all;
        differ += got[d] != of_want[d];
        if (IsNear(got[d], of_want[d])) got[d] = of_want[d];
      }
    });
    return static_cast<double>(differ) / static_cast<double>(all);
  }

  std::vector<Guarded<uint8_t>> data;
  LevelDigests view = {};
};

struct DigestsCase {
  const char* name;
  int32_t block_tokens, kv_heads, head_dim;
  int32_t ring_blocks;  // if > 0, rows are decode rows
  bool bulk;            // rows name their first positions
  DigestsOf digests = DigestsOf::kAllLevels;
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
    {"whole sequences, level 0 alone", 16, 3, 96, 0, true, DigestsOf::kFirstLevel},
    {"decode rows in a ring, level 0 alone", 32, 2, 64, 5, false, DigestsOf::kFirstLevel},
    {"whole sequences, spread", 16, 2, 128, 0, true, DigestsOf::kFirstLevelWithSpread},
    {"whole sequences, spread, blocks of 48", 48, 3, 80, 0, true, DigestsOf::kFirstLevelWithSpread},
    {"whole sequences, spread, head_dim 256", 64, 1, 256, 0, true,
     DigestsOf::kFirstLevelWithSpread},
    {"decode rows, spread", 32, 1, 16, 0, false, DigestsOf::kFirstLevelWithSpread},
    {"decode rows in a ring, spread", 16, 2, 64, 11, false, DigestsOf::kFirstLevelWithSpread},
};

constexpr int32_t kSlots = 6, kTokens = 1024;

// Fills the cache with elements of mean 0 and deviation 1; but in one column of eight they have
// mean 60 and deviation 0.5, as outlier channels of keys do, and in another all elements are equal.
template <typename T>
void FillKeys(TestCache<T>& cache, Random& random) {
  const auto put = [](float v, T& out) {
    if constexpr (sizeof(T) == 4) {
      out = v;
    } else {
      out = FloatToBf16(v);
    }
  };
  const int64_t outlier = Pick(random, 0, 7), equal = (outlier + Pick(random, 1, 7)) % 8;
  cache.Fill(random);
  for (int64_t i = 0; i < cache.data.size(); ++i) {
    const int64_t column = i % cache.view.head_dim % 8;
    if (column == outlier) put(60 + 0.5f * NearlyNormal(random), cache.data[i]);
    if (column == equal) put(61.7f, cache.data[i]);
  }
}

// Checks by hand one piece of a digest of the reference, the mean of tokens [begin, end).
template <typename T>
void CheckOnePiece(TestCache<T>& cache, TestLevels& levels, const float* centres, int32_t level,
                   int64_t slot, int64_t block, int64_t piece, int64_t begin, int64_t end) {
  const int64_t dim = cache.view.head_dim, head = cache.view.kv_heads - 1;
  const uint8_t* const digest = levels.of[static_cast<size_t>(level)].Row(slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) {
      sum += Value(cache.Key(slot, t, head)[d]) -
             double{centres[(slot * cache.view.kv_heads + head) * dim + d]};
    }
    const double mean = sum / static_cast<double>(end - begin);
    const double got = E4M3ToFloat(digest[piece * dim + d]);
    REQUIRE(std::fabs(got - mean) <= std::max(0x1p-10, std::fabs(mean) / 16) + 1e-5);
  }
}

// Checks by hand the spread of a digest of level 0: the mean, over its pieces, of half the mean
// square of the differences of all pairs of a piece's keys.
template <typename T>
void CheckOneSpread(TestCache<T>& cache, TestLevels& levels, int64_t slot, int64_t block) {
  constexpr int64_t kPiece = LevelTokens(0) / kDigestPieces;
  const int64_t dim = cache.view.head_dim, head = cache.view.kv_heads - 1;
  const uint8_t* const digest = levels.of[0].Row(slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    double squares = 0;
    for (int64_t i = 0; i < LevelTokens(0); ++i) {
      for (int64_t j = i / kPiece * kPiece; j < i; ++j) {
        const int64_t t = block * LevelTokens(0) + i, u = block * LevelTokens(0) + j;
        const double off = Value(cache.Key(slot, t, head)[d]) - Value(cache.Key(slot, u, head)[d]);
        squares += off * off;
      }
    }
    const double spread = squares / (kPiece * kPiece * kDigestPieces);
    const double got = E4M3ToFloat(digest[kDigestPieces * dim + d]);
    REQUIRE(std::fabs(got - spread) <= std::max(0x1p-10, spread / 16) + 1e-5);
  }
}

template <typename T>
void CheckDigests(const KernelTable& table, const DigestsCase& c, Random& random) {
  INFO(c.name << ", " << sizeof(T) << " bytes an element");
  TestCache<T> cache(kSlots, kTokens / c.block_tokens + 1, c.block_tokens, c.kv_heads, c.head_dim,
                     random, c.ring_blocks);
  FillKeys(cache, random);
  TestLevels want(kSlots, kTokens, c.head_dim, c.kv_heads, random, c.digests);
  auto centres = NormalBuffer<float>(int64_t{kSlots} * c.kv_heads * c.head_dim, random, 30.0f);
  // Rows that complete the first chunk and a later one, that lie just beside the end of a chunk,
  // and that are shorter than the sink.
  const auto slots = BufferOf<int32_t>({3, 0, -1, 1, 4, -1, 2, 5});
  const auto positions =
      BufferOf<int32_t>({127, 126, 255, 7 * 128 - 1, 7 * 128, 0, Pick(random, 2, 6) * 128 - 1, 63});
  // These rows begin before, at and behind the end of a chunk, and where there is none.
  const auto first = BufferOf<int32_t>({127, 0, 0, 128, 2 * 128 - 1, 0, Pick(random, 0, 255), 63});
  LevelDigestsParams p = {
      cache.view,       want.view, centres.data(), slots.data(), c.bulk ? first.data() : nullptr,
      positions.data(), 8};
  RunWorkers(Reference().level_digests, p, 1);
  LevelCopies got(want);
  p.digests = got.view;
  RunThreads(table.level_digests, p, 1);
  for (int workers : {3, 7}) {
    LevelCopies again(want);
    p.digests = again.view;
    RunThreads(table.level_digests, p, workers);
    for (size_t level = 0; level < again.data.size(); ++level) {
      CHECK(again.data[level].Damage() == "");
      CHECK(BitDifference(again.data[level].span(), got.data[level].span(), want.view.of[0].dim) ==
            "");
    }
  }
  // Pieces that were rounded before they are joined would show in far more elements.
  const double differ = got.TakeNear(want);
  CHECK(differ < 0.01);
  CHECK(got.DifferenceFrom(want) == "");
  // The reference's own: the sink has no digest, the first large block has the pieces of its second
  // half twice, and a chunk that is not complete has none.
  const float* const all = centres.data();
  CheckOnePiece(cache, want, all, 0, 1, 55, 3, 55 * 16 + 12, 56 * 16);
  if (c.digests == DigestsOf::kFirstLevelWithSpread) CheckOneSpread(cache, want, 1, 55);
  if (c.digests == DigestsOf::kAllLevels) {
    for (int64_t piece : {0, 2}) CheckOnePiece(cache, want, all, 3, 3, 0, piece, 64, 96);
    for (int64_t piece : {1, 3}) CheckOnePiece(cache, want, all, 3, 3, 0, piece, 96, 128);
    CheckOnePiece(cache, want, all, 2, 3, 1, 1, 80, 96);
    CheckOnePiece(cache, want, all, 1, 1, 26, 0, 26 * 32, 26 * 32 + 8);
  }
  const Guarded<uint8_t> untouched(want.view.of[0].dim);
  for (int32_t level = 0; level < want.levels; ++level) {
    auto& rows = want.of[static_cast<size_t>(level)];
    const auto is_untouched = [&](int64_t slot, int64_t block) {
      return std::memcmp(rows.Row(slot, block, 0), untouched.data(),
                         static_cast<size_t>(untouched.size())) == 0;
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
SLUICE_TEST_LEVELS("level digests are near, and leave out the sink and what is not complete",
                   TestDigests)

// A sequence grows token by token in a ring of 256 + 128 tokens; its digests are those of its whole
// cache.
void CheckDigestsGrow(const KernelTable& table, DigestsOf digests, Random& random) {
  INFO(Name(digests));
  constexpr int32_t kLast = 700, kHeads = 2, kDim = 32;
  TestCache<uint16_t> whole(1, kTokens / 32, 32, kHeads, kDim, random);
  TestCache<uint16_t> ring(1, 12, 32, kHeads, kDim, random, 12);
  whole.Fill(random);
  TestLevels want(1, kTokens, kDim, kHeads, random, digests);
  LevelCopies grown(want);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  auto positions = BufferOf<int32_t>({kLast});
  RunWorkers(table.level_digests,
             LevelDigestsParams{whole.view, want.view, nullptr, slots.data(), first.data(),
                                positions.data(), 1},
             3);
  for (int32_t t = 0; t <= kLast; ++t) {
    for (int32_t h = 0; h < kHeads; ++h) std::copy_n(whole.Key(0, t, h), kDim, ring.Key(0, t, h));
    positions[0] = t;
    RunWorkers(table.level_digests,
               LevelDigestsParams{ring.view, grown.view, nullptr, slots.data(), nullptr,
                                  positions.data(), 1},
               1);
  }
  CHECK(grown.DifferenceFrom(want) == "");
}

void TestDigestsGrow(const KernelTable& table, Random& random) {
  for (const DigestsOf digests : kAllDigests) CheckDigestsGrow(table, digests, random);
}
SLUICE_TEST_LEVELS("level digests extended token by token in a ring are those of the whole",
                   TestDigestsGrow)

// Keys of one unit and head are not finite: digests of blocks with this unit are unspecified, and
// all others stay as they were.
template <typename T>
void CheckUnitNotFinite(const KernelTable& table, DigestsOf digests, Random& random) {
  INFO(Name(digests));
  constexpr int32_t kUnit = 21, kHeads = 2, kDim = 64, kAll = 512;
  const T bad[] = {std::is_same_v<T, float> ? T(INFINITY) : T(0x7F80),
                   std::is_same_v<T, float> ? T(-INFINITY) : T(0xFF80),
                   std::is_same_v<T, float> ? T(NAN) : T(0x7FC0)};
  TestCache<T> cache(1, kAll / 32, 32, kHeads, kDim, random);
  cache.Fill(random);
  TestLevels want(1, kAll, kDim, kHeads, random, digests);
  LevelCopies got(want);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  const auto positions = BufferOf<int32_t>({kAll - 1});
  LevelDigestsParams p = {cache.view,   want.view,        nullptr, slots.data(),
                          first.data(), positions.data(), 1};
  RunWorkers(table.level_digests, p, 2);
  for (int64_t t = kUnit * LevelTokens(0); t < (kUnit + 1) * LevelTokens(0); ++t) {
    for (int64_t d = 0; d < kDim; ++d) {
      if (d < 3 || random() % 2 == 0) cache.Key(0, t, 0)[d] = bad[d < 3 ? d : random() % 3];
    }
  }
  p.digests = got.view;
  RunWorkers(table.level_digests, p, 2);
  const auto row_bytes = static_cast<size_t>(want.view.of[0].dim);
  for (int32_t level = 0; level < want.levels; ++level) {
    const int64_t block = kUnit >> level;
    uint8_t* const of_got = got.Row(level, 0, block, 0);
    const uint8_t* const of_want = want.of[static_cast<size_t>(level)].Row(0, block, 0);
    CHECK(std::memcmp(of_got, of_want, row_bytes) != 0);
    std::copy_n(of_want, row_bytes, of_got);
  }
  CHECK(got.DifferenceFrom(want) == "");
}

void TestUnitNotFinite(const KernelTable& table, Random& random) {
  for (const DigestsOf digests : kAllDigests) {
    CheckUnitNotFinite<uint16_t>(table, digests, random);
    CheckUnitNotFinite<float>(table, digests, random);
  }
}
SLUICE_TEST_LEVELS("level digests of other blocks do not change where keys are not finite",
                   TestUnitNotFinite)

}  // namespace
}  // namespace sluice::kernels
