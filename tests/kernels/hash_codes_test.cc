// Hash codes of keys and queries, centres of keys, and scores of codes.
#include <cmath>

#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kBlocks = 12, kBlockTokens = 16, kTokens = kBlocks * kBlockTokens;
constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;

struct CodeCase {
  const char* name;
  int32_t kv_heads, head_dim, words, rows_per_page;
  DType cache_type, length_type;
  bool ring = false, centred = false;
};
const CodeCase kCases[] = {
    {"256 bits of heads of 128", 2, 128, 8, 64, kBf16, kBf16},
    {"256 bits of heads of 64, centred", 3, 64, 8, 64, kBf16, kBf16, false, true},
    {"96 bits of heads of 48, odd pages", 3, 48, 3, 5, kF32, kF32},
    {"32 bits of heads of 256", 1, 256, 1, 33, kBf16, kF32},
    {"128 bits of a ring", 2, 64, 4, 40, kBf16, kBf16, true},
    {"160 bits of heads of 80", 1, 80, 5, 17, kF32, kBf16},
    {"96 bits of a ring, centred", 2, 32, 3, 40, kF32, kF32, true, true},
};

// Returns the sum whose sign is a bit.
template <typename T>
double BitSum(const T* x, const float* centre, const float* hash, int64_t dim, int64_t bits,
              int64_t bit) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double of_centre = centre != nullptr ? double{centre[d]} : 0.0;
    sum += (double{Value(x[d])} - of_centre) * double{hash[d * bits + bit]};
  }
  return sum;
}

bool BitOf(const int32_t* code, int64_t bit) {
  return (static_cast<uint32_t>(code[bit / 32]) >> (bit % 32) & 1u) != 0;
}

// Keys, a hash matrix, and room for codes and lengths of every token.
template <typename T, typename L>
struct Keys {
  Keys(const CodeCase& c, Random& random)
      : of(c),
        cache(kSlots, c.ring ? 4 : kBlocks, kBlockTokens, c.kv_heads, c.head_dim, random,
              c.ring ? 4 : 0),
        hash(NormalBuffer<float>(int64_t{c.kv_heads} * c.head_dim * c.words * 32, random)),
        centres(NormalBuffer<float>(int64_t{kSlots} * c.kv_heads * c.head_dim, random)),
        codes(kSlots, kTokens, c.rows_per_page, c.words, c.kv_heads, random),
        lengths(kSlots, kTokens, c.rows_per_page + 3, 1, c.kv_heads, random),
        slots(BufferOf({2, -1, 0, 3})),
        positions(BufferOf({191, 5, 0, 77})),
        first_positions(BufferOf({c.ring ? 150 : 3, 0, 0, 60})) {
    cache.Fill(random);
  }

  HashKeysParams Params(bool bulk) {
    return {cache.view,
            hash.data(),
            codes.view,
            lengths.view,
            slots.data(),
            bulk ? first_positions.data() : nullptr,
            positions.data(),
            4,
            of.centred ? centres.data() : nullptr};
  }
  const float* Centre(int32_t slot, int32_t head) const {
    return of.centred ? centres.data() + int64_t{slot * of.kv_heads + head} * of.head_dim : nullptr;
  }
  void Clear() {
    std::memset(codes.data.data(), 0xFF, codes.data.span().size_bytes());
    std::memset(lengths.data.data(), 0xFF, lengths.data.span().size_bytes());
  }

  const CodeCase of;
  TestCache<T> cache;
  Guarded<float> hash, centres;
  TestRows<int32_t> codes;
  TestRows<L> lengths;
  Guarded<int32_t> slots, positions, first_positions;
};

template <typename Check>
void ForEachCase(Random& random, Check check) {
  for (const CodeCase& c : kCases) {
    INFO(c.name);
    const auto with = [&](auto keys) { check(keys); };
    if (c.cache_type == kF32 && c.length_type == kF32) with(Keys<float, float>(c, random));
    if (c.cache_type == kF32 && c.length_type == kBf16) with(Keys<float, uint16_t>(c, random));
    if (c.cache_type == kBf16 && c.length_type == kF32) with(Keys<uint16_t, float>(c, random));
    if (c.cache_type == kBf16 && c.length_type == kBf16) with(Keys<uint16_t, uint16_t>(c, random));
  }
}

// Checks a token's code and length against sums in float64. A sum so near 0 that float32 may lose
// its sign says nothing.
template <typename AnyKeys>
void CheckToken(AnyKeys& keys, int32_t slot, int32_t token, int32_t head, int64_t* undecided) {
  const int64_t dim = keys.of.head_dim, bits = int64_t{keys.of.words} * 32;
  const auto* key = keys.cache.Key(slot, token, head);
  const float* hash = keys.hash.data() + head * dim * bits;
  const int32_t* code = keys.codes.Row(slot, token, head);
  const float* const centre = keys.Centre(slot, head);
  double squares = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double of_centre = centre != nullptr ? double{centre[d]} : 0.0;
    squares += std::pow(double{Value(key[d])} - of_centre, 2);
  }
  for (int64_t bit = 0; bit < bits; ++bit) {
    const double sum = BitSum(key, centre, hash, dim, bits, bit);
    if (std::abs(sum) < 2e-5 * std::sqrt(squares)) {
      ++*undecided;
    } else {
      REQUIRE(BitOf(code, bit) == (sum > 0));
    }
  }
  const double rounding = keys.of.length_type == kF32 ? 1e-6 : 4.1e-3;
  const double length = std::sqrt(squares);
  REQUIRE(std::abs(double{Value(*keys.lengths.Row(slot, token, head))} - length) <=
          rounding * length);
}

void TestKeys(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](auto& keys) {
    for (const bool bulk : {true, false}) {
      keys.Clear();
      RunThreads(path.hash_keys, keys.Params(bulk), 3);
      CHECK(keys.codes.data.Damage() + keys.lengths.data.Damage() == "");
      int64_t undecided = 0, tokens = 0;
      for (int64_t r = 0; r < keys.slots.size(); ++r) {
        if (keys.slots[r] < 0) continue;
        const int32_t last = keys.positions[r];
        for (int32_t t = bulk ? keys.first_positions[r] : last; t <= last; ++t, ++tokens) {
          for (int32_t h = 0; h < keys.of.kv_heads; ++h) {
            CheckToken(keys, keys.slots[r], t, h, &undecided);
          }
        }
      }
      CHECK(undecided * 100 <= tokens * keys.of.kv_heads * keys.of.words * 32);
      // Tokens outside the range keep the length that they had.
      CHECK(std::isnan(Value(*keys.lengths.Row(1, 5, 0))));
      CHECK(std::isnan(Value(*keys.lengths.Row(3, bulk ? 59 : 76, 0))));
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("codes and lengths of keys are those of float64 sums", TestKeys)

void TestKeysBits(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](auto& keys) {
    keys.Clear();
    RunWorkers(path.hash_keys, keys.Params(true), 1);
    const auto codes = CopyOf(keys.codes.data);
    const auto lengths = CopyOf(keys.lengths.data);
    keys.Clear();
    RunThreads(path.hash_keys, keys.Params(true), 5);
    // Alone a token has the code that it has among many.
    RunWorkers(path.hash_keys, keys.Params(false), 2);
    CHECK(std::ranges::equal(keys.codes.data.span(), codes.span()));
    CHECK(std::memcmp(keys.lengths.data.data(), lengths.data(), lengths.span().size_bytes()) == 0);
  });
}
SLUICE_TEST_ON_EVERY_PATH("a key's code is the same alone, among many and with any workers",
                          TestKeysBits)

void TestCentres(const KernelTable& path, Random& random) {
  const auto check = [&](auto element, int32_t head_dim) {
    using T = decltype(element);
    constexpr int32_t kHeads = 3, kLong = 600;
    TestCache<T> cache(kSlots, (kLong + kBlockTokens - 1) / kBlockTokens, kBlockTokens, kHeads,
                       head_dim, random);
    cache.Fill(random);
    const Guarded<int32_t> slots = BufferOf({2, -1, 0, 3, 1});
    const Guarded<int32_t> positions = BufferOf({kLong - 1, 5, 0, 255, 299});
    Guarded<float> centres(int64_t{kSlots} * kHeads * head_dim);
    RunThreads(path.key_centres,
               KeyCentresParams{cache.view, slots.data(), positions.data(), centres.data(), 5}, 3);
    CHECK(centres.Damage() == "");
    for (int32_t r = 0; r < 5; ++r) {
      if (slots[r] < 0) continue;
      const int32_t tokens = positions[r] + 1, count = std::min(tokens, kCentreKeys);
      for (int32_t h = 0; h < kHeads; ++h) {
        for (int32_t d = 0; d < head_dim; ++d) {
          double sum = 0;
          for (int32_t i = 0; i < count; ++i) {
            sum += double{Value(cache.Key(slots[r], i * tokens / count, h)[d])};
          }
          const float got = centres[int64_t{slots[r] * kHeads + h} * head_dim + d];
          REQUIRE(std::abs(double{got} - sum / count) <= 1e-5);
        }
      }
    }
  };
  check(float{}, 48);
  check(uint16_t{}, 128);
}
SLUICE_TEST_ON_EVERY_PATH("centres are means of keys at equal distances", TestCentres)

int LevelAt(const int32_t* planes, int64_t words, int64_t bit) {
  int level = 0;
  for (int i = 0; i < kHashPlanes; ++i) {
    const int value = i == kHashPlanes - 1 ? -(1 << i) : 1 << i;
    if (BitOf(planes + i * words, bit)) level += value;
  }
  return level;
}

void TestQueries(const KernelTable& path, Random& random) {
  for (const CodeCase& c : kCases) {
    INFO(c.name);
    for (const auto& [group, levels] : {std::pair{1, 7}, {3, 7}, {8, 7}, {3, 1}}) {
      const int32_t heads = group * c.kv_heads, rows = 4, bits = c.words * 32;
      const int64_t stride = int64_t{heads} * c.head_dim + 7;
      const Guarded<float> q = NormalBuffer<float>(rows * stride, random);
      const Guarded<float> hash =
          NormalBuffer<float>(int64_t{c.kv_heads} * c.head_dim * bits, random);
      const Guarded<int32_t> slots = BufferOf({2, -1, 0, 3});
      const int64_t of_query = int64_t{kHashPlanes} * c.words;
      Guarded<int32_t> codes(rows * heads * of_query), alone(heads * of_query);
      HashQueriesParams p = {q.data(), stride,     slots.data(), hash.data(), codes.data(), rows,
                             heads,    c.kv_heads, c.head_dim,   c.words,     levels};
      RunThreads(path.hash_queries, p, 3);
      CHECK(codes.Damage() == "");
      int64_t undecided = 0;
      for (int32_t r = 0; r < rows; ++r) {
        for (int32_t h = 0; h < heads; ++h) {
          const int32_t* const planes = codes.data() + (r * int64_t{heads} + h) * of_query;
          if (slots[r] < 0) {
            CHECK(std::all_of(planes, planes + of_query, [](int32_t x) { return x == -1; }));
            continue;
          }
          std::vector<double> sums;
          double largest = 0;
          for (int32_t bit = 0; bit < bits; ++bit) {
            sums.push_back(BitSum(q.data() + r * stride + h * c.head_dim, nullptr,
                                  hash.data() + int64_t{h / group} * c.head_dim * bits, c.head_dim,
                                  bits, bit));
            largest = std::max(largest, std::abs(sums.back()));
          }
          for (int32_t bit = 0; bit < bits; ++bit) {
            const double sum = sums[static_cast<size_t>(bit)];
            const int level = LevelAt(planes, c.words, bit);
            if (levels == 1) {
              if (std::abs(sum) < 1e-4) continue;
              REQUIRE(level == (sum > 0 ? 1 : -1));
              continue;
            }
            // Float32 may round a level to either side of a half.
            const double exact = 7 * sum / largest;
            REQUIRE(std::abs(level - exact) <= 0.5 + 1e-4);
            undecided += std::abs(std::abs(exact - std::floor(exact)) - 0.5) < 1e-4 ? 1 : 0;
          }
        }
      }
      // One sum in some thousands lies so near a half. The few of chance are allowed for, since
      // the smallest case has 128 sums.
      CHECK(undecided <= 4 + int64_t{rows} * heads * bits / 200);
      // A row has the code alone that it has among others.
      p.rows = 1;
      p.slots = slots.data() + 3;
      p.q = q.data() + 3 * stride;
      p.codes = alone.data();
      RunWorkers(path.hash_queries, p, 1);
      CHECK(std::equal(alone.begin(), alone.end(), codes.data() + 3 * heads * of_query));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("levels of queries are those of float64 products", TestQueries)

void TestOddQueries(const KernelTable& path, Random& random) {
  constexpr int32_t kDim = 64, kWords = 8;
  Guarded<float> q = NormalBuffer<float>(3 * kDim, random);
  const Guarded<float> hash = NormalBuffer<float>(kDim * kWords * 32, random);
  for (int32_t d = 0; d < kDim; ++d) q[d] = 0;
  q[kDim + 5] = NAN;
  q[2 * kDim + 5] = INFINITY;
  const Guarded<int32_t> slots = BufferOf({0, 1, 2});
  Guarded<int32_t> codes(3 * kHashPlanes * kWords);
  RunWorkers(path.hash_queries,
             HashQueriesParams{q.data(), kDim, slots.data(), hash.data(), codes.data(), 3, 1, 1,
                               kDim, kWords, kMostHashLevels},
             1);
  CHECK(codes.Damage() == "");
  CHECK(std::all_of(codes.begin(), codes.end(), [](int32_t x) { return x == 0; }));
}
SLUICE_TEST_ON_EVERY_PATH("a query of zeros or with a number that is none has levels of 0",
                          TestOddQueries)

struct ScoreCase {
  int32_t kv_heads, group, words, rows_per_page;
  DType length_type;
};
const ScoreCase kScoreCases[] = {{8, 4, 8, 204, kBf16}, {2, 5, 8, 64, kBf16}, {3, 1, 3, 5, kF32},
                                 {1, 2, 1, 16, kF32},   {2, 3, 4, 33, kBf16}, {1, 7, 8, 40, kF32},
                                 {2, 8, 5, 64, kBf16},  {1, 40, 8, 7, kBf16}};

template <typename L>
void CheckScores(const KernelTable& path, const ScoreCase& c, Random& random) {
  constexpr int32_t kRows = 6, kMost = 2500;
  constexpr int64_t kStride = kMost + 3;
  const int32_t heads = c.kv_heads * c.group, lists = kRows * c.kv_heads;
  TestRows<int32_t> codes(5, kMost, c.rows_per_page, c.words, c.kv_heads, random);
  TestRows<L> lengths(5, kMost, c.rows_per_page, 1, c.kv_heads, random);
  for (int32_t& word : codes.data) word = static_cast<int32_t>(random());
  FillNormal(std::span<L>(lengths.data.data(), static_cast<size_t>(lengths.data.size())), random);
  Guarded<int32_t> q_codes(int64_t{kRows} * heads * kHashPlanes * c.words), wanted(lists);
  for (int32_t& word : q_codes) word = static_cast<int32_t>(random());
  for (int32_t& one : wanted) one = random() % 3 == 0 ? 0 : 1;
  const Guarded<int32_t> slots = BufferOf({3, 0, -1, 4, 1, 2});
  const Guarded<int32_t> positions = BufferOf({kMost - 1, 0, 9, 1, 2048, 100});
  for (const bool all : {true, false}) {
    const GroupReduction reduction = all ? GroupReduction::kMax : GroupReduction::kMean;
    Guarded<float> want(lists * kStride), got(lists * kStride), again(lists * kStride);
    const auto params = [&](Guarded<float>& scores) {
      return HashScoresParams{q_codes.data(), all ? nullptr : wanted.data(),
                              slots.data(),   positions.data(),
                              codes.view,     lengths.view,
                              scores.data(),  kStride,
                              kRows,          heads,
                              reduction};
    };
    RunWorkers(Reference().hash_scores, params(want), 1);
    RunWorkers(path.hash_scores, params(got), 1);
    RunThreads(path.hash_scores, params(again), 4);
    CHECK(got.Damage() == "");
    // Exact, to the bit; what is not written stays NaN.
    CHECK(std::memcmp(got.data(), want.data(), want.span().size_bytes()) == 0);
    CHECK(std::memcmp(again.data(), want.data(), want.span().size_bytes()) == 0);
    for (int64_t list = 0; list < lists; ++list) {
      const int64_t r = list / c.kv_heads;
      const bool written = slots[r] >= 0 && (all || wanted[list] != 0);
      CHECK(std::isinf(want[list * kStride + positions[r]]) == written);
      CHECK(std::isnan(want[list * kStride + positions[r] + 1]));
    }
  }
}

void TestScores(const KernelTable& path, Random& random) {
  for (const ScoreCase& c : kScoreCases) {
    INFO("group of " << c.group << ", " << c.words << " words");
    if (c.length_type == kF32) {
      CheckScores<float>(path, c, random);
    } else {
      CheckScores<uint16_t>(path, c, random);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("scores of codes are exact, of wanted lists alone", TestScores)

// Levels estimate products: of keys of one length, which have a common part, the one that lies in
// the direction of a query has the largest score.
TEST_CASE("the key in the direction of a query has the largest score of keys of its length") {
  Random random(11);
  const CodeCase c = {"", 1, 64, 8, 16, kF32, kF32, false, true};
  Keys<float, float> keys(c, random);
  float* const centre = keys.centres.data();  // of slot 0
  for (int32_t t = 0; t < kTokens; ++t) {
    float* key = keys.cache.Key(0, t, 0);
    double squares = 0;
    for (int32_t d = 0; d < 64; ++d) squares += double{key[d]} * double{key[d]};
    for (int32_t d = 0; d < 64; ++d) {
      key[d] = key[d] / static_cast<float>(std::sqrt(squares)) + 5 * centre[d];
    }
  }
  Guarded<float> query(64);
  for (int32_t d = 0; d < 64; ++d) query[d] = keys.cache.Key(0, 123, 0)[d] - 5 * centre[d];
  const Guarded<int32_t> slots = BufferOf({0}), first = BufferOf({0}), last = BufferOf({190}),
                         position = BufferOf({191});
  const KernelTable& table = *FindKernelTable("portable");
  RunWorkers(table.key_centres,
             KeyCentresParams{keys.cache.view, slots.data(), last.data(), centre, 1}, 1);
  HashKeysParams p = keys.Params(true);
  p.slots = slots.data();
  p.first_positions = first.data();
  p.positions = last.data();
  p.rows = 1;
  RunWorkers(table.hash_keys, p, 1);
  Guarded<int32_t> codes(kHashPlanes * 8);
  RunWorkers(table.hash_queries,
             HashQueriesParams{query.data(), 64, slots.data(), keys.hash.data(), codes.data(), 1, 1,
                               1, 64, 8, kMostHashLevels},
             1);
  Guarded<float> scores(192);
  RunWorkers(table.hash_scores,
             HashScoresParams{codes.data(), nullptr, slots.data(), position.data(), keys.codes.view,
                              keys.lengths.view, scores.data(), 192, 1, 1, GroupReduction::kMax},
             1);
  CHECK(std::max_element(scores.begin(), scores.end()) == scores.begin() + 123);
}

}  // namespace
}  // namespace sluice::kernels
