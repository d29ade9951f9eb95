// Fluxion's digests at four levels.
#include "tests/kernels/levels_support.h"

namespace sluice::kernels {
namespace {

// How far digests may be off the reference's. With the root mean square r of the elements, a sum of
// 16 in float32, of the elements or of their differences from one of them, has a mean that is off
// by at most 1.5e-6 r, and joined means no more; the variance is off by at most 3e-5 of itself and
// (1.5e-6 r)^2. Each is then rounded to its type, maybe to the other neighbour.
template <typename T>
struct DigestLimits {
  static constexpr double kOfMean = 1.5e-6, kOfVariance = 3e-5;
  static constexpr double kUlp = sizeof(T) == 2 ? 0x1p-7 : 0x1p-23;

  static bool IsNear(const T* got, const T* want, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) {
      const double mean = Value(want[d]), variance = Value(want[dim + d]);
      const double off = kOfMean * std::sqrt(mean * mean + variance);
      const double of_mean = std::fabs(Value(got[d]) - mean);
      const double of_variance = std::fabs(Value(got[dim + d]) - variance);
      const bool is_near = of_mean <= kUlp * std::fabs(mean) + off &&
                           of_variance <= (kUlp + kOfVariance) * variance + off * off &&
                           Value(got[dim + d]) >= 0;
      if (!is_near) return false;
    }
    return true;
  }
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
  T* Row(int32_t level, int64_t slot, int64_t block, int64_t head) {
    return data[static_cast<size_t>(level)].data() +
           RowOffset(view.of[level], slot, block, head) / static_cast<int64_t>(sizeof(T));
  }
  // Returns an empty string where the bits are equal.
  std::string DifferenceFrom(const TestLevels<T>& want) const {
    for (size_t level = 0; level < data.size(); ++level) {
      const std::string difference =
          data[level].Damage() +
          BitDifference(data[level].span(), want.of[level].data.span(), want.view.of[level].dim);
      if (!difference.empty()) return "level " + std::to_string(level) + ": " + difference;
    }
    return "";
  }
  // Makes rows that are near those of `want` equal to them. Returns the share of their numbers that
  // were not, among those that are not 0.
  double TakeNear(TestLevels<T>& want) {
    int64_t differ = 0, all = 0;
    want.ForEachRow([&](int32_t level, int64_t slot, int64_t block, int64_t head) {
      const int64_t dim = want.view.of[level].dim;
      T* const got = Row(level, slot, block, head);
      const T* const of_want = want.of[static_cast<size_t>(level)].Row(slot, block, head);
      if (!DigestLimits<T>::IsNear(got, of_want, dim / 2)) return;
      for (int64_t d = 0; d < dim; ++d) {
        all += Value(of_want[d]) != 0;
        differ += Value(of_want[d]) != 0 && Value(got[d]) != Value(of_want[d]);
        got[d] = of_want[d];
      }
    });
    return static_cast<double>(differ) / static_cast<double>(std::max<int64_t>(all, 1));
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

// Checks by hand one digest of the reference: the variance is half the mean square of the
// differences of all pairs.
template <typename T>
void CheckOneDigest(TestCache<T>& cache, TestLevels<T>& levels, int32_t level, int64_t slot,
                    int64_t block, int64_t begin) {
  constexpr double kHalfUlp = sizeof(T) == 2 ? 0x1p-8 : 0x1p-24;
  const int64_t dim = cache.view.head_dim, head = cache.view.kv_heads - 1;
  const int64_t end = (block + 1) * LevelTokens(level);
  const T* const digest = levels.of[static_cast<size_t>(level)].Row(slot, block, head);
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0, squares = 0;
    for (int64_t t = begin; t < end; ++t) {
      const double k = Value(cache.Key(slot, t, head)[d]);
      sum += k;
      for (int64_t u = begin; u < t; ++u) {
        const double off = k - Value(cache.Key(slot, u, head)[d]);
        squares += off * off;
      }
    }
    const auto tokens = static_cast<double>(end - begin);
    const double mean = sum / tokens, variance = squares / (tokens * tokens);
    REQUIRE(std::fabs(Value(digest[d]) - mean) <= kHalfUlp * std::fabs(mean) + 1e-12);
    REQUIRE(std::fabs(Value(digest[dim + d]) - variance) <= kHalfUlp * variance + 1e-12);
  }
}

template <typename T>
void CheckDigests(const KernelTable& table, const DigestsCase& c, Random& random) {
  INFO(c.name << ", " << sizeof(T) << " bytes an element");
  TestCache<T> cache(kSlots, kTokens / c.block_tokens + 1, c.block_tokens, c.kv_heads, c.head_dim,
                     random, c.ring_blocks);
  FillKeys(cache, random);
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
  LevelCopies<T> got(want);
  p.digests = got.view;
  RunThreads(table.level_digests, p, 1);
  for (int workers : {3, 7}) {
    LevelCopies<T> again(want);
    p.digests = again.view;
    RunThreads(table.level_digests, p, workers);
    for (size_t level = 0; level < again.data.size(); ++level) {
      CHECK(again.data[level].Damage() == "");
      CHECK(BitDifference(again.data[level].span(), got.data[level].span(), 2 * c.head_dim) == "");
    }
  }
  // Halves that were rounded before they are joined would show in far more numbers.
  const double differ = got.TakeNear(want);
  if (sizeof(T) == 2) CHECK(differ < 0.01);
  CHECK(got.DifferenceFrom(want) == "");
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
SLUICE_TEST_LEVELS("level digests are near, and leave out the sink and what is not complete",
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

// Keys of one unit and head are not finite: digests of blocks with this unit are unspecified, and
// all others stay as they were.
template <typename T>
void CheckUnitNotFinite(const KernelTable& table, Random& random) {
  constexpr int32_t kUnit = 21, kHeads = 2, kDim = 64, kAll = 512;
  const T bad[] = {std::is_same_v<T, float> ? T(INFINITY) : T(0x7F80),
                   std::is_same_v<T, float> ? T(-INFINITY) : T(0xFF80),
                   std::is_same_v<T, float> ? T(NAN) : T(0x7FC0)};
  TestCache<T> cache(1, kAll / 32, 32, kHeads, kDim, random);
  cache.Fill(random);
  TestLevels<T> want(1, kAll, kDim, kHeads, random);
  LevelCopies<T> got(want);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  const auto positions = BufferOf<int32_t>({kAll - 1});
  LevelDigestsParams p = {cache.view, want.view, slots.data(), first.data(), positions.data(), 1};
  RunWorkers(table.level_digests, p, 2);
  for (int64_t t = kUnit * LevelTokens(0); t < (kUnit + 1) * LevelTokens(0); ++t) {
    for (int64_t d = 0; d < kDim; ++d) {
      if (d < 3 || random() % 2 == 0) cache.Key(0, t, 0)[d] = bad[d < 3 ? d : random() % 3];
    }
  }
  p.digests = got.view;
  RunWorkers(table.level_digests, p, 2);
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    const int64_t block = kUnit >> level;
    T* const of_got = got.Row(level, 0, block, 0);
    const T* const of_want = want.of[static_cast<size_t>(level)].Row(0, block, 0);
    CHECK(std::memcmp(of_got, of_want, 2 * kDim * sizeof(T)) != 0);
    std::copy_n(of_want, 2 * kDim, of_got);
  }
  CHECK(got.DifferenceFrom(want) == "");
}

void TestUnitNotFinite(const KernelTable& table, Random& random) {
  CheckUnitNotFinite<uint16_t>(table, random);
  CheckUnitNotFinite<float>(table, random);
}
SLUICE_TEST_LEVELS("level digests of other blocks do not change where keys are not finite",
                   TestUnitNotFinite)

}  // namespace
}  // namespace sluice::kernels
