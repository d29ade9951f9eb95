// Key codes, and the scores of a shortlist of blocks from them.
#include <cmath>
#include <set>
#include <string_view>

#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kKvHeads = 2;

// Sequences with their digests and key codes, made by the reference.
template <typename T>
struct CodedCache {
  CodedCache(int32_t blocks, int32_t block_tokens, int32_t head_dim, Random& random)
      : tokens(blocks * block_tokens),
        cache(kSlots, blocks, block_tokens, kKvHeads, head_dim, random),
        digests(kSlots, blocks, 5, 2 * head_dim, kKvHeads, random),
        codes(kSlots, tokens, 3 * block_tokens, 2 * KeyCodeWords(head_dim), kKvHeads, random) {
    cache.Fill(random);
    const auto slots = BufferOf<int32_t>({0, 1, 2, 3}), first = BufferOf<int32_t>({0, 0, 0, 0});
    const auto last = BufferOf<int32_t>({tokens - 1, tokens - 1, tokens - 1, tokens - 1});
    RunWorkers(Reference().digest,
               DigestParams{cache.view, digests.view, slots.data(), first.data(), last.data(),
                            kSlots, codes.view},
               1);
  }

  int32_t tokens;
  TestCache<T> cache;
  TestRows<T> digests;
  TestRows<int32_t> codes;
};

template <typename T>
void CheckCodes(const KernelTable& table, int32_t block_tokens, int32_t head_dim, bool bulk,
                Random& random) {
  INFO("blocks of " << block_tokens << ", head_dim " << head_dim << ", bulk " << bulk << ", "
                    << sizeof(T) << " bytes an element");
  constexpr int32_t kBlocks = 7;
  TestCache<T> cache(kSlots, kBlocks, block_tokens, kKvHeads, head_dim, random);
  cache.Fill(random);
  // Elements that are the same in all of a block have an empty range.
  for (int32_t t = 0; t < block_tokens; ++t) {
    T* const key = cache.Key(1, t, 0);
    std::fill_n(key, head_dim, cache.Key(1, 0, 0)[0]);
  }
  TestRows<T> digests(kSlots, kBlocks, 4, 2 * head_dim, kKvHeads, random);
  TestRows<int32_t> codes(kSlots, kBlocks * block_tokens, 2 * block_tokens,
                          2 * KeyCodeWords(head_dim), kKvHeads, random);
  const auto slots = BufferOf<int32_t>({1, -1, 0, 2, 3});
  const auto positions = BufferOf<int32_t>({block_tokens - 1, 5, 4 * block_tokens - 1,
                                            3 * block_tokens + 2, kBlocks * block_tokens - 2});
  const auto first = BufferOf<int32_t>({0, 0, block_tokens + 3, 0, 2 * block_tokens});
  DigestParams p = {
      cache.view, digests.view, slots.data(), bulk ? first.data() : nullptr, positions.data(),
      5,          codes.view};
  RunWorkers(Reference().digest, p, 1);
  for (int workers : {1, 3}) {
    Guarded<T> got(digests.data.size());
    Guarded<int32_t> got_codes(codes.data.size());
    p.digests = digests.At(got);
    p.codes = codes.At(got_codes);
    RunThreads(table.digest, p, workers);
    CHECK(got_codes.Damage() == "");
    CHECK(BitDifference(got_codes.span(), codes.data.span(), 2 * KeyCodeWords(head_dim)) == "");
  }
  // By hand: a code names the quarter that the element lies in.
  const int32_t words = KeyCodeWords(head_dim), token = 3 * block_tokens + 1;
  const int32_t* row = codes.Row(0, token, 1);
  const T* digest = digests.Row(0, 3, 1);
  for (int32_t d = 0; d < head_dim; ++d) {
    const bool upper = (row[d / 32] >> d % 32 & 1) != 0;
    const bool outer = (row[words + d / 32] >> d % 32 & 1) != 0;
    const int quarter = upper ? 2 + outer : 1 - outer;
    const double least = Value(digest[d]), range = Value(digest[head_dim + d]) - least;
    const double key = Value(cache.Key(0, token, 1)[d]);
    REQUIRE(key >= least + range * quarter / 4 - 1e-6);
    REQUIRE(key <= least + range * (quarter + 1) / 4 + 1e-6);
  }
}

void TestCodes(const KernelTable& table, Random& random) {
  for (const bool bulk : {false, true}) {
    CheckCodes<uint16_t>(table, 32, 64, bulk, random);
    CheckCodes<float>(table, 16, 128, bulk, random);
    CheckCodes<uint16_t>(table, 48, 80, bulk, random);
    CheckCodes<float>(table, 8, 16, bulk, random);
  }
}
SLUICE_TEST_ON_EVERY_PATH("key codes name the quarter of each element, once a block is complete",
                          TestCodes)

// A shortlist of about `share` of a row's blocks.
std::vector<int32_t> Shortlist(int32_t newest, double share, Random& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int32_t> blocks;
  for (int32_t block = 0; block <= newest; ++block) {
    if (uniform(random) < share) blocks.push_back(block);
  }
  return blocks;
}

template <typename T>
void CheckRefined(const KernelTable& table, int32_t group, int32_t head_dim, int32_t blocks,
                  int32_t block_tokens, Random& random) {
  CodedCache<T> of(blocks, block_tokens, head_dim, random);
  const int32_t heads = kKvHeads * group, rows = 5, stride = blocks + 3;
  const int64_t q_stride = int64_t{heads} * head_dim + 5;
  const auto q = NormalBuffer<float>(rows * q_stride, random, 2.0f);
  const auto slots = BufferOf<int32_t>({2, -1, 0, 1, 3});
  const auto positions =
      BufferOf<int32_t>({0, 9, 3 * block_tokens - 1, of.tokens - 1, of.tokens - block_tokens + 7});
  TestLists lists(rows * kKvHeads, blocks);
  for (int32_t list = 0; list < rows * kKvHeads; ++list) {
    const int32_t row = list / kKvHeads;
    if (slots[row] < 0) continue;
    lists.Put(list, Shortlist(positions[row] / block_tokens, list % 3 == 0 ? 1.0 : 0.4, random));
  }
  for (const GroupReduction reduction :
       {GroupReduction::kMax, GroupReduction::kMean, GroupReduction::kSoftmaxSum}) {
    INFO("group " << group << " head_dim " << head_dim << " blocks " << blocks << " of "
                  << block_tokens << " reduction " << static_cast<int>(reduction) << ", "
                  << sizeof(T) << " bytes an element");
    RefineScoresParams p = {.q = q.data(),
                            .q_stride = q_stride,
                            .slots = slots.data(),
                            .positions = positions.data(),
                            .digests = of.digests.view,
                            .codes = of.codes.view,
                            .units = lists.view,
                            .scores = nullptr,
                            .score_stride = stride,
                            .rows = rows,
                            .heads = heads,
                            .block_tokens = block_tokens,
                            .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                            .reduction = reduction};
    const int64_t size = int64_t{rows} * kKvHeads * stride;
    Guarded<float> want(size), first(size);
    p.scores = want.data();
    RunWorkers(Reference().refine_scores, p, 1);
    double largest = 0;
    for (const float v : want) {
      if (std::isfinite(v)) largest = std::max<double>(largest, std::fabs(v));
    }
    // On a GPU, keys and queries are rounded to bf16.
    const double tolerance = std::string_view(table.name) == "cuda" ? 1e-2 : 1e-5;
    for (const int workers : {1, 2, 7}) {
      Guarded<float> got(size);
      p.scores = got.data();
      RunThreads(table.refine_scores, p, workers);
      CHECK(got.Damage() == "");
      CHECK(Difference(got.span(), want.span(), tolerance, stride, largest / 4) == "");
      if (workers == 1) first = CopyOf(got);
      CHECK(BitDifference(got.span(), first.span(), stride) == "");
    }
    // A row's scores are the same alone.
    for (int64_t r = 0; r < rows; ++r) {
      Guarded<float> alone(size);
      RefineScoresParams one = p;
      one.rows = 1;
      one.q += r * q_stride;
      one.slots += r;
      one.positions += r;
      one.units.units += r * kKvHeads * lists.view.capacity;
      one.units.counts += r * kKvHeads;
      one.scores = alone.data() + r * kKvHeads * stride;
      RunWorkers(table.refine_scores, one, 2);
      for (int64_t i = r * kKvHeads * stride; i < (r + 1) * kKvHeads * stride; ++i) {
        REQUIRE((alone[i] == first[i] || (std::isnan(alone[i]) && std::isnan(first[i]))));
      }
    }
  }
}

void TestRefined(const KernelTable& table, Random& random) {
  for (const int32_t group : {1, 3, 4, 5, 8, 12}) {
    CheckRefined<uint16_t>(table, group, 64, 9, 32, random);
    CheckRefined<uint16_t>(table, group, 128, 70, 16, random);
  }
  CheckRefined<float>(table, 3, 64, 11, 32, random);
  CheckRefined<float>(table, 2, 16, 130, 8, random);
  CheckRefined<uint16_t>(table, 4, 80, 9, 48, random);
  CheckRefined<uint16_t>(table, 2, 256, 6, 16, random);
}
SLUICE_TEST_ON_EVERY_PATH("refined scores agree with the reference, and are a row's own",
                          TestRefined)

// Codes are there to tell blocks apart that digests cannot: their scores lie much nearer to those
// of the keys than the digests' bounds do.
void TestNearer(const KernelTable& table, Random& random) {
  constexpr int32_t kBlocks = 40, kBlockTokens = 32, kDim = 64;
  CodedCache<uint16_t> of(kBlocks, kBlockTokens, kDim, random);
  const auto q = NormalBuffer<float>(kKvHeads * kDim, random, 2.0f);
  const auto slots = BufferOf<int32_t>({1}), positions = BufferOf<int32_t>({of.tokens - 1});
  TestLists all(kKvHeads, kBlocks);
  for (int32_t h = 0; h < kKvHeads; ++h) {
    std::vector<int32_t> blocks(kBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    all.Put(h, blocks);
  }
  Guarded<float> bounds(kKvHeads * kBlocks), refined(kKvHeads * kBlocks), exact(kKvHeads * kBlocks);
  RunWorkers(table.digest_scores,
             DigestScoresParams{q.data(), kKvHeads * kDim, slots.data(), positions.data(),
                                of.digests.view, bounds.data(), kBlocks, 1, kKvHeads, kBlockTokens,
                                0.125f, GroupReduction::kMax},
             1);
  RunWorkers(table.refine_scores,
             RefineScoresParams{q.data(), kKvHeads * kDim, slots.data(), positions.data(),
                                of.digests.view, of.codes.view, all.view, refined.data(), kBlocks,
                                1, kKvHeads, kBlockTokens, 0.125f, GroupReduction::kMax},
             1);
  RunWorkers(table.exact_scores,
             ExactScoresParams{q.data(), kKvHeads * kDim, slots.data(), positions.data(),
                               of.cache.view, exact.data(), kBlocks, 1, kKvHeads, kBlockTokens,
                               0.125f, GroupReduction::kMax},
             1);
  double of_bounds = 0, of_refined = 0;
  for (int64_t h = 0; h < kKvHeads; ++h) {
    for (int64_t b = 0; b + 1 < kBlocks; ++b) {
      const int64_t i = h * kBlocks + b;
      of_bounds += std::fabs(bounds[i] - exact[i]);
      of_refined += std::fabs(refined[i] - exact[i]);
    }
  }
  INFO("mean distance from the keys' scores: bounds " << of_bounds / (kKvHeads * (kBlocks - 1))
                                                      << ", refined "
                                                      << of_refined / (kKvHeads * (kBlocks - 1)));
  CHECK(of_refined < of_bounds / 10);
}
SLUICE_TEST_ON_EVERY_PATH("refined scores lie nearer to the keys' scores than bounds", TestNearer)

}  // namespace
}  // namespace sluice::kernels
