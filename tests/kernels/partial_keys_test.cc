#include "kernels/kernel_cases.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

struct PartialCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rank;
  int32_t rows_per_page;
  DType cache_type;
  DType partial_type;
  bool ring = false;
};

const std::vector<PartialCase>& Cases() {
  constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  static const std::vector<PartialCase> cases = {
      {"group 4, rank 32", 8, 2, 128, 32, 64, kBf16, kBf16},
      {"group 1, rank 20, float32", 2, 2, 64, 20, 16, kF32, kF32},
      {"group 3, rank 7, odd pages", 9, 3, 48, 7, 5, kBf16, kF32},
      {"group 17, rank 100", 17, 1, 128, 100, 32, kBf16, kBf16},
      {"group 8, full rank, float32 cache", 8, 1, 80, 80, 33, kF32, kBf16},
      {"group 2, rank 16, ring", 4, 2, 64, 16, 32, kBf16, kBf16, true},
      {"group 5, rank 38, a policy's pages", 10, 2, 128, 38, 204, kBf16, kBf16},
      {"group 11, rank 64, rows between pages", 11, 1, 128, 64, 40, kBf16, kBf16},
      {"group 3, rank 2", 3, 1, 64, 2, 64, kBf16, kBf16},
  };
  return cases;
}

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kTokens = 300;  // most tokens of a slot

// Rows: (slot, position), two of them padded.
const std::vector<AttentionRow> kRows = {{0, 0},  {-1, 9}, {1, 1},  {2, 15},  {3, 16},
                                         {4, 63}, {5, 64}, {-1, 0}, {6, 130}, {7, 299}};

// Caches (T), partial keys (P), a projection and queries.
template <typename T, typename P>
class Fixture {
 public:
  Fixture(const PartialCase& c, Random& random)
      : case_(c),
        blocks_(c.ring ? 4 : (kTokens + kBlockTokens - 1) / kBlockTokens),
        pages_((kTokens + c.rows_per_page - 1) / c.rows_per_page) {
    const int64_t slots = 8;
    table_ = Guarded<int32_t>(slots * blocks_);
    page_table_ = Guarded<int32_t>(slots * pages_);
    for (int64_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<int32_t>(i);
    for (int64_t i = 0; i < page_table_.size(); ++i) page_table_[i] = static_cast<int32_t>(i);
    std::shuffle(table_.begin(), table_.end(), random);
    std::shuffle(page_table_.begin(), page_table_.end(), random);
    const int64_t page_elements = int64_t{c.kv_heads} * 2 * kBlockTokens * c.head_dim;
    cache_ = NormalBuffer<T>(slots * blocks_ * page_elements, random);
    projection_ = NormalBuffer<float>(int64_t{c.kv_heads} * c.head_dim * c.rank, random,
                                      1.0f / std::sqrt(static_cast<float>(c.head_dim)));
    q_ = NormalBuffer<float>(static_cast<int64_t>(kRows.size()) * q_stride(), random);
    slots_ = Guarded<int32_t>(static_cast<int64_t>(kRows.size()));
    positions_ = Guarded<int32_t>(slots_.size());
    first_positions_ = Guarded<int32_t>(slots_.size());
    for (int64_t r = 0; r < slots_.size(); ++r) {
      slots_[r] = kRows[static_cast<size_t>(r)].slot;
      positions_[r] = kRows[static_cast<size_t>(r)].position;
      // A ring has only the newest tokens.
      first_positions_[r] = c.ring ? std::max(0, positions_[r] - 40) : positions_[r] / 3;
    }
  }

  int64_t q_stride() const { return int64_t{case_.heads} * case_.head_dim + 5; }
  // Pages of rows, with a little room between the heads'.
  Guarded<P> NewPartial() const { return Guarded<P>(8 * pages_ * PageElements()); }
  Guarded<float> NewScores() const {
    return Guarded<float>(static_cast<int64_t>(kRows.size()) * case_.kv_heads * kScoreStride);
  }

  PagedRows Rows(Guarded<P>& partial) const {
    const auto element = static_cast<int64_t>(sizeof(P));
    return {partial.data(),
            page_table_.data(),
            pages_,
            PageElements() * element,
            HeadElements() * element,
            case_.rows_per_page,
            case_.rank,
            case_.partial_type,
            case_.kv_heads};
  }

  PartialKeysParams Keys(Guarded<P>& partial, bool bulk) {
    return {{cache_.data(), table_.data(), blocks_,
             int64_t{case_.kv_heads} * 2 * kBlockTokens * case_.head_dim *
                 static_cast<int64_t>(sizeof(T)),
             kBlockTokens, case_.kv_heads, case_.head_dim, case_.cache_type,
             case_.ring ? static_cast<int32_t>(blocks_) : 0},
            projection_.data(),
            Rows(partial),
            slots_.data(),
            bulk ? first_positions_.data() : nullptr,
            positions_.data(),
            static_cast<int32_t>(kRows.size())};
  }

  PartialScoresParams Scores(Guarded<P>& partial, Guarded<float>& scores,
                             GroupReduction reduction) {
    return {q_.data(),         q_stride(),         slots_.data(),
            positions_.data(), projection_.data(), Rows(partial),
            scores.data(),     kScoreStride,       static_cast<int32_t>(kRows.size()),
            case_.heads,       case_.head_dim,     0.125f,
            reduction};
  }

  const Guarded<int32_t>& page_table() const { return page_table_; }

  static constexpr int64_t kScoreStride = kTokens + 3;

 private:
  // In odd pages rows begin anywhere; in others each page's first row begins on a multiple of 16
  // bytes.
  int64_t HeadElements() const {
    return int64_t{case_.rows_per_page} * case_.rank + (case_.rows_per_page % 2 != 0 ? 6 : 8);
  }
  int64_t PageElements() const { return case_.kv_heads * HeadElements(); }

  const PartialCase case_;
  const int64_t blocks_, pages_;
  Guarded<int32_t> table_{0}, page_table_{0}, slots_{0}, positions_{0}, first_positions_{0};
  Guarded<T> cache_{0};
  Guarded<float> projection_{0}, q_{0};
};

// Calls check(case, fixture, empty guarded buffer of the partial keys' type).
template <typename Check>
void ForEachCase(Random& random, Check check) {
  for (const PartialCase& c : Cases()) {
    INFO(c.name);
    const bool cache32 = c.cache_type == DType::kFloat32;
    const bool partial32 = c.partial_type == DType::kFloat32;
    const auto with = [&](auto fixture) { check(c, fixture); };
    if (cache32 && partial32) with(Fixture<float, float>(c, random));
    if (cache32 && !partial32) with(Fixture<float, uint16_t>(c, random));
    if (!cache32 && partial32) with(Fixture<uint16_t, float>(c, random));
    if (!cache32 && !partial32) with(Fixture<uint16_t, uint16_t>(c, random));
  }
}

void TestKeys(const KernelTable& path, Random& random) {
  const KernelTable& reference = *FindKernelTable("reference");
  ForEachCase(random, [&](const PartialCase& c, auto& fixture) {
    for (bool bulk : {true, false}) {
      auto want = fixture.NewPartial(), got = fixture.NewPartial();
      RunWorkers(reference.partial_keys, fixture.Keys(want, bulk), 1);
      RunWorkers(path.partial_keys, fixture.Keys(got, bulk), 3);
      CHECK(got.Damage() == "");
      // The tolerance is one bf16 rounding of sums that differ in their last bits.
      const double tolerance = c.partial_type == DType::kFloat32 ? 1e-6 : 5e-4;
      CHECK(Difference(got.span(), want.span(), tolerance, c.rank) == "");
      // Memory of no row stays as it was.
      for (int64_t i = 0; i < got.size(); ++i) {
        if (std::isnan(Value(want[i]))) REQUIRE(std::isnan(Value(got[i])));
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("partial keys agree with the reference", TestKeys)

void TestKeysBits(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const PartialCase& c, auto& fixture) {
    auto want = fixture.NewPartial();
    RunWorkers(path.partial_keys, fixture.Keys(want, true), 1);
    for (int workers : {2, 16}) {
      auto got = fixture.NewPartial();
      RunThreads(path.partial_keys, fixture.Keys(got, true), workers);
      CHECK(std::memcmp(got.data(), want.data(), got.span().size_bytes()) == 0);
    }
    // A token's key alone has the bits that it has among many.
    auto single = fixture.NewPartial();
    std::copy(want.begin(), want.end(), single.begin());
    RunWorkers(path.partial_keys, fixture.Keys(single, false), 1);
    CHECK(BitDifference(single.span(), want.span(), c.rank) == "");
  });
}
SLUICE_TEST_ON_EVERY_PATH("a partial key has the same bits alone, among many and with any workers",
                          TestKeysBits)

constexpr GroupReduction kReductions[] = {GroupReduction::kMax, GroupReduction::kMean,
                                          GroupReduction::kSoftmaxSum};

// Makes partial keys of every token before each row's position; the newest token's stay NaN.
template <typename PartialFixture>
auto KnownKeys(PartialFixture& fixture) {
  auto partial = fixture.NewPartial();
  PartialKeysParams p = fixture.Keys(partial, true);
  Guarded<int32_t> first = BufferOf<int32_t>({0}), position = BufferOf<int32_t>({0});
  for (int32_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0 || p.positions[r] == 0) continue;
    PartialKeysParams one = p;
    position[0] = p.positions[r] - 1;
    one.slots = p.slots + r;
    one.first_positions = first.data();
    one.positions = position.data();
    one.rows = 1;
    RunWorkers(FindKernelTable("reference")->partial_keys, one, 1);
  }
  return partial;
}

void TestScores(const KernelTable& path, Random& random) {
  const KernelTable& reference = *FindKernelTable("reference");
  ForEachCase(random, [&](const PartialCase& c, auto& fixture) {
    auto partial = KnownKeys(fixture);
    for (GroupReduction reduction : kReductions) {
      INFO("reduction " << static_cast<int>(reduction));
      auto want = fixture.NewScores(), got = fixture.NewScores(), again = fixture.NewScores();
      RunWorkers(reference.partial_scores, fixture.Scores(partial, want, reduction), 1);
      RunWorkers(path.partial_scores, fixture.Scores(partial, got, reduction), 1);
      RunThreads(path.partial_scores, fixture.Scores(partial, again, reduction), 5);
      CHECK(got.Damage() == "");
      CHECK(Difference(got.span(), want.span(), 2e-6, want.size()) == "");
      CHECK(std::memcmp(got.data(), again.data(), got.span().size_bytes()) == 0);
      const int64_t stride = want.size() / static_cast<int64_t>(kRows.size()) / c.kv_heads;
      for (int64_t list = 0; list * stride < want.size(); ++list) {
        const AttentionRow& row = kRows[static_cast<size_t>(list / c.kv_heads)];
        for (int64_t t = 0; t < stride; ++t) {
          const float score = got[list * stride + t];
          const bool known = row.slot >= 0 && t < row.position;
          const bool newest = row.slot >= 0 && t == row.position;
          REQUIRE(std::isfinite(score) == known);
          REQUIRE(std::isinf(score) == newest);
        }
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH(
    "partial scores agree with the reference, have the same bits with any workers, and are -inf at "
    "the newest token",
    TestScores)

// If the projection loses nothing, partial scores are the scores themselves.
void TestFullRank(const KernelTable& path, Random& random) {
  const PartialCase c = {"identity", 3, 1, 32, 32, 16, DType::kFloat32, DType::kFloat32};
  Fixture<float, float> fixture(c, random);
  Guarded<float> identity(32 * 32);
  for (int64_t i = 0; i < identity.size(); ++i) identity[i] = i / 32 == i % 32 ? 1.0f : 0.0f;
  auto partial = fixture.NewPartial();
  auto scores = fixture.NewScores();
  PartialKeysParams keys = fixture.Keys(partial, true);
  Guarded<int32_t> zeros(keys.rows);
  std::fill(zeros.begin(), zeros.end(), 0);
  keys.first_positions = zeros.data();
  keys.projection = identity.data();
  RunWorkers(path.partial_keys, keys, 1);
  PartialScoresParams p = fixture.Scores(partial, scores, GroupReduction::kMax);
  p.projection = identity.data();
  RunWorkers(path.partial_scores, p, 1);
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t t = 0; p.slots[r] >= 0 && t < p.positions[r]; ++t) {
      double largest = -1e30;
      for (int64_t h = 0; h < 3; ++h) {
        double dot = 0;
        const int64_t key = KeyIndex(keys.cache, p.slots[r], t, 0);
        for (int64_t d = 0; d < 32; ++d) {
          dot += double{p.q[r * p.q_stride + h * 32 + d]} *
                 double{static_cast<const float*>(keys.cache.base)[key + d]};
        }
        largest = std::max(largest, dot * 0.125);
      }
      REQUIRE(std::fabs(scores[r * p.score_stride + t] - largest) < 1e-5);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("partial scores of a projection that loses nothing are the scores",
                          TestFullRank)

}  // namespace
}  // namespace sluice::kernels
