// Digests, and the scores of units from digests and from keys.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

struct DigestCase {
  const char* name;
  int32_t block_tokens, kv_heads, head_dim;
  int32_t ring_blocks;  // if > 0, rows are decode rows
  bool bulk;            // rows name their first positions
};

const DigestCase kDigestCases[] = {
    {"decode rows", 32, 3, 64, 0, false},
    {"decode rows in a ring of one block", 16, 2, 128, 1, false},
    {"decode rows in a ring of three", 32, 1, 80, 3, false},
    {"whole sequences", 32, 2, 64, 0, true},
    {"whole sequences, blocks of 48", 48, 1, 16, 0, true},
    {"whole sequences, head_dim 256", 16, 2, 256, 0, true},
};

constexpr int32_t kDigestSlots = 5, kDigestBlocks = 9;

template <typename T>
void CheckDigest(const KernelTable& table, const DigestCase& c, Random& random) {
  INFO(c.name << ", " << sizeof(T) << " bytes an element");
  TestCache<T> cache(kDigestSlots, kDigestBlocks, c.block_tokens, c.kv_heads, c.head_dim, random,
                     c.ring_blocks);
  cache.Fill(random);
  // The digests are exact also where floats are denormal: nothing may be flushed.
  FillNormal(std::span<T>(cache.Key(0, 0, 0), static_cast<size_t>(c.head_dim)), random, 1e-39f);
  TestRows<T> digests(kDigestSlots, kDigestBlocks, 4, 2 * c.head_dim, c.kv_heads, random);
  const int32_t block = c.block_tokens;
  // Rows that are alone in their block, fill a block, lie in the middle of a later block, and the
  // last possible one.
  const auto slots = BufferOf<int32_t>({3, 0, -1, 1, 4, -1, 2});
  const auto positions =
      BufferOf<int32_t>({0, block - 1, 7, 4 * block, kDigestBlocks * block - 1, 0, 5 * block + 3});
  const auto first = BufferOf<int32_t>({0, 0, 7, 2 * block + 5, 0, 0, 5 * block + 1});
  DigestParams p = {
      cache.view, digests.view, slots.data(), c.bulk ? first.data() : nullptr, positions.data(), 7};
  RunWorkers(Reference().digest, p, 1);
  for (int workers : {1, 2, 7}) {
    Guarded<T> got(digests.data.size());
    p.digests = digests.At(got);
    RunThreads(table.digest, p, workers);
    CHECK(got.Damage() == "");
    CHECK(BitDifference(got.span(), digests.data.span(), c.head_dim) == "");
  }
  // The reference's digests, checked by hand: a row's own block, up to its own position.
  const T* of_slot_2 = digests.Row(2, 5, c.kv_heads - 1);
  for (int64_t d = 0; d < c.head_dim; ++d) {
    double least = 1e30, largest = -1e30;
    for (int64_t t = 5 * block; t <= 5 * block + 3; ++t) {
      const double key = Value(cache.Key(2, t, c.kv_heads - 1)[d]);
      least = std::min(least, key);
      largest = std::max(largest, key);
    }
    REQUIRE(Value(of_slot_2[d]) == least);
    REQUIRE(Value(of_slot_2[c.head_dim + d]) == largest);
  }
}

void TestDigest(const KernelTable& table, Random& random) {
  for (const DigestCase& c : kDigestCases) {
    CheckDigest<uint16_t>(table, c, random);
    CheckDigest<float>(table, c, random);
  }
}
SLUICE_TEST_ON_EVERY_PATH("digests are exact, and cover the tokens up to a row's position",
                          TestDigest)

void TestDigestGrows(const KernelTable& table, Random& random) {
  constexpr int32_t kTokens = 75;
  TestCache<uint16_t> cache(1, 5, 16, 2, 64, random);
  cache.Fill(random);
  TestRows<uint16_t> whole(1, 5, 3, 128, 2, random);
  Guarded<uint16_t> grown(whole.data.size());
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  auto positions = BufferOf<int32_t>({kTokens - 1});
  DigestParams p = {cache.view, whole.view, slots.data(), first.data(), positions.data(), 1};
  RunWorkers(table.digest, p, 3);
  p.digests = whole.At(grown);
  p.first_positions = nullptr;
  for (int32_t t = 0; t < kTokens; ++t) {
    positions[0] = t;
    RunWorkers(table.digest, p, 1);
  }
  CHECK(BitDifference(grown.span(), whole.data.span(), 64) == "");
}
SLUICE_TEST_ON_EVERY_PATH("digests extended token by token are those of the whole", TestDigestGrows)

// Rows of several sequences, and scores of each of their units.
struct ScoreInput {
  ScoreInput(int32_t heads_of_group, int32_t head_dim, int32_t blocks, int32_t block_tokens,
             Random& random)
      : group(heads_of_group),
        heads(kKvHeads * group),
        q_stride(int64_t{heads} * head_dim + 5),
        slots(BufferOf<int32_t>({2, -1, 0, 1, 3})),
        positions(BufferOf<int32_t>({0, 9, 3 * block_tokens - 1, blocks * block_tokens - 1,
                                     (blocks - 2) * block_tokens + 7})),
        q(NormalBuffer<float>(kRows * q_stride, random, 2.0f)) {}

  static constexpr int32_t kRows = 5, kKvHeads = 2;
  const int32_t group, heads;
  const int64_t q_stride;
  const Guarded<int32_t> slots, positions;
  const Guarded<float> q;
};

// Runs `kernel` and the reference's on the same input; scores past a row's units stay untouched.
// The same bits come out with any number of workers, and for every row alone.
template <typename Params>
void CheckScores(void (*kernel)(const Params&, Worker), void (*reference)(const Params&, Worker),
                 Params p, int32_t kv_heads, double tolerance) {
  const int64_t size = p.rows * kv_heads * p.score_stride;
  Guarded<float> want(size);
  p.scores = want.data();
  RunWorkers(reference, p, 1);
  double largest = 0;
  for (float v : want) {
    if (std::isfinite(v)) largest = std::max<double>(largest, std::fabs(v));
  }
  Guarded<float> first(size);
  for (int workers : {1, 2, 3, 11}) {
    Guarded<float> got(size);
    p.scores = got.data();
    RunThreads(kernel, p, workers);
    CHECK(got.Damage() == "");
    CHECK(Difference(got.span(), want.span(), tolerance, p.score_stride, largest / 20) == "");
    if (workers == 1) first = CopyOf(got);
    CHECK(BitDifference(got.span(), first.span(), p.score_stride) == "");
  }
  Guarded<float> alone(size);
  const Params all = p;
  for (int64_t r = 0; r < all.rows; ++r) {
    p.rows = 1;
    p.q = all.q + r * all.q_stride;
    p.slots = all.slots + r;
    p.positions = all.positions + r;
    p.scores = alone.data() + r * kv_heads * all.score_stride;
    RunWorkers(kernel, p, 2);
  }
  CHECK(BitDifference(alone.span(), first.span(), all.score_stride) == "");
}

constexpr GroupReduction kReductions[] = {GroupReduction::kMax, GroupReduction::kMean,
                                          GroupReduction::kSoftmaxSum};

template <typename T>
void CheckDigestScores(const KernelTable& table, int32_t group, int32_t head_dim, int32_t blocks,
                       Random& random) {
  constexpr int32_t kBlockTokens = 32, kKvHeads = ScoreInput::kKvHeads;
  const ScoreInput in(group, head_dim, blocks, kBlockTokens, random);
  TestRows<T> digests(4, blocks, 5, 2 * head_dim, kKvHeads, random);
  for (int64_t i = 0; i < digests.data.size(); ++i) digests.data[i] = T{};
  for (int32_t slot = 0; slot < 4; ++slot) {
    for (int32_t block = 0; block < blocks; ++block) {
      for (int32_t h = 0; h < kKvHeads; ++h) {
        T* row = digests.Row(slot, block, h);
        FillNormal(std::span<T>(row, static_cast<size_t>(2 * head_dim)), random);
        for (int64_t d = 0; d < head_dim; ++d) {
          if (Value(row[d]) > Value(row[head_dim + d])) std::swap(row[d], row[head_dim + d]);
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    const GroupReduction reduction = kReductions[i % 3];
    const float narrowed = i < 3 ? 0.0f : 0.25f * static_cast<float>(1 + random() % 4);
    INFO("group " << group << " head_dim " << head_dim << " blocks " << blocks << " reduction "
                  << static_cast<int>(reduction) << " narrowed " << narrowed << ", " << sizeof(T)
                  << " bytes an element");
    const DigestScoresParams p = {.q = in.q.data(),
                                  .q_stride = in.q_stride,
                                  .slots = in.slots.data(),
                                  .positions = in.positions.data(),
                                  .digests = digests.view,
                                  .scores = nullptr,
                                  .score_stride = blocks + 3,
                                  .rows = in.kRows,
                                  .heads = in.heads,
                                  .block_tokens = kBlockTokens,
                                  .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                                  .reduction = reduction,
                                  .narrowed = narrowed};
    // Terms of narrowed ranges may cancel each other.
    CheckScores(table.digest_scores, Reference().digest_scores, p, kKvHeads,
                reduction == GroupReduction::kSoftmaxSum ? 1e-5
                : narrowed > 0                           ? 4e-6
                                                         : 2e-6);
  }
}

void TestDigestScores(const KernelTable& table, Random& random) {
  for (int32_t group : {1, 2, 3, 4, 7, 8, 12}) {
    CheckDigestScores<uint16_t>(table, group, 64, 7, random);
    CheckDigestScores<float>(table, group, 32, 70, random);
  }
  for (int32_t head_dim : {16, 80, 128, 256}) {
    CheckDigestScores<uint16_t>(table, 4, head_dim, 130, random);
  }
}
SLUICE_TEST_ON_EVERY_PATH("digest scores agree with the reference, and are a row's own",
                          TestDigestScores)

template <typename T>
void CheckExactScores(const KernelTable& table, int32_t group, int32_t head_dim,
                      int32_t unit_tokens, Random& random) {
  constexpr int32_t kBlockTokens = 32, kBlocks = 9, kKvHeads = ScoreInput::kKvHeads;
  const ScoreInput in(group, head_dim, kBlocks, kBlockTokens, random);
  TestCache<T> cache(4, kBlocks, kBlockTokens, kKvHeads, head_dim, random);
  cache.Fill(random);
  for (GroupReduction reduction : kReductions) {
    INFO("group " << group << " head_dim " << head_dim << " units of " << unit_tokens
                  << " reduction " << static_cast<int>(reduction) << ", " << sizeof(T)
                  << " bytes an element");
    const ExactScoresParams p = {.q = in.q.data(),
                                 .q_stride = in.q_stride,
                                 .slots = in.slots.data(),
                                 .positions = in.positions.data(),
                                 .cache = cache.view,
                                 .scores = nullptr,
                                 .score_stride = kBlocks * kBlockTokens / unit_tokens + 2,
                                 .rows = in.kRows,
                                 .heads = in.heads,
                                 .unit_tokens = unit_tokens,
                                 .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                                 .reduction = reduction};
    CheckScores(table.exact_scores, Reference().exact_scores, p, kKvHeads,
                reduction == GroupReduction::kSoftmaxSum ? 1e-5 : 2e-6);
  }
}

void TestExactScores(const KernelTable& table, Random& random) {
  for (int32_t unit_tokens : {1, 8, 16, 32, 64, 96}) {
    CheckExactScores<uint16_t>(table, 3, 64, unit_tokens, random);
    CheckExactScores<float>(table, 1, 16, unit_tokens, random);
  }
  CheckExactScores<uint16_t>(table, 9, 128, 32, random);
  CheckExactScores<uint16_t>(table, 4, 80, 1, random);
}
SLUICE_TEST_ON_EVERY_PATH("exact scores agree with the reference, and are a row's own",
                          TestExactScores)

// Quest's bound: no key of a block scores higher than its digest.
void TestBound(const KernelTable& table, Random& random) {
  constexpr int32_t kTokens = 16 * 20 + 5, kBlocks = 21;
  TestCache<uint16_t> cache(1, kBlocks, 16, 2, 64, random);
  cache.Fill(random);
  TestRows<uint16_t> digests(1, kBlocks, 8, 128, 2, random);
  const auto slots = BufferOf<int32_t>({0}), first = BufferOf<int32_t>({0});
  const auto positions = BufferOf<int32_t>({kTokens - 1});
  const auto q = NormalBuffer<float>(6 * 64, random);
  Guarded<float> bounds(2 * kBlocks), scores(2 * kTokens);
  RunWorkers(
      table.digest,
      DigestParams{cache.view, digests.view, slots.data(), first.data(), positions.data(), 1}, 1);
  RunWorkers(table.digest_scores,
             DigestScoresParams{q.data(), 6 * 64, slots.data(), positions.data(), digests.view,
                                bounds.data(), kBlocks, 1, 6, 16, 0.125f, GroupReduction::kMax},
             1);
  RunWorkers(table.exact_scores,
             ExactScoresParams{q.data(), 6 * 64, slots.data(), positions.data(), cache.view,
                               scores.data(), kTokens, 1, 6, 1, 0.125f, GroupReduction::kMax},
             1);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < kTokens / 16 * 16; ++t) {  // the newest block has no score
      REQUIRE(scores[h * kTokens + t] <= bounds[h * kBlocks + t / 16] + 1e-5f);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("no key scores above the digest of its block", TestBound)

}  // namespace
}  // namespace sluice::kernels
