// PullAttention and MergeParts. A thread of the test is the arbiter, and grants parts in random
// order. What is merged from the parts that were granted is held to the reference's SparseAttention
// over the units of just these parts.
#include <optional>

#include "tests/kernels/pull_support.h"

namespace sluice::kernels {
namespace {

using Clock = std::chrono::steady_clock;

// As in sparse_attention_test.cc.
void CheckMerged(const KernelTable& path, const PullCase& c, const Merged& got,
                 const Merged& want) {
  const bool tensor_cores = std::string_view(path.name) == "cuda";
  const int64_t width = int64_t{c.shape.heads} * c.shape.head_dim;
  CHECK(Difference(got.o.span(), want.o.span(), tensor_cores ? 2e-5 : 3e-6, width) == "");
  CHECK(Difference(got.lse.span(), want.lse.span(), tensor_cores ? 1e-5 : 1e-6, c.shape.heads) ==
        "");
  for (int64_t i = 0; i < want.o.size(); ++i) {
    REQUIRE(std::isnan(got.o[i]) == std::isnan(want.o[i]));
  }
  for (int64_t i = 0; i < want.lse.size(); ++i) {
    REQUIRE(std::isnan(got.lse[i]) == std::isnan(want.lse[i]));
  }
}

constexpr std::chrono::seconds kNever{60};

void TestGranted(const KernelTable& path, Random& random) {
  ForEachPullCase(random, [&](const PullCase& c, auto& setup) {
    std::vector<GrantedPart> parts = setup.AllParts();
    for (const size_t percent : {100, 40, 0, 75}) {
      INFO(percent << " % of the parts are granted");
      std::shuffle(parts.begin(), parts.end(), random);
      const std::vector<GrantedPart> granted(
          parts.begin(), parts.begin() + static_cast<int64_t>(parts.size() * percent / 100));
      REQUIRE(setup.Launch(path, granted, false, kNever) == "");
      CHECK(setup.words().missed[0] == 0);
      CheckMerged(path, c, setup.Merge(path), setup.Want(granted));
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("parts that are granted are attended to, and no others", TestGranted)

void TestBits(const KernelTable& path, Random& random) {
  ForEachPullCase(random, [&](const PullCase& c, auto& setup) {
    std::vector<GrantedPart> parts = setup.AllParts();
    std::optional<Merged> first;
    for (int launch = 0; launch < 3; ++launch) {
      std::shuffle(parts.begin(), parts.end(), random);
      REQUIRE(setup.Launch(path, parts, false, kNever) == "");
      Merged merged = setup.Merge(path);
      if (!first.has_value()) {
        first.emplace(std::move(merged));
        continue;
      }
      CHECK(BitDifference(merged.o.span(), first->o.span(), c.shape.head_dim) == "");
      CHECK(BitDifference(merged.lse.span(), first->lse.span(), c.shape.heads) == "");
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("results have the same bits whoever pulls which part", TestBits)

// The next launch goes on with the words as an unanswered ask left them.
void TestDeadline(const KernelTable& path, Random& random) {
  ForEachPullCase(random, [&](const PullCase& c, auto& setup) {
    std::vector<GrantedPart> parts = setup.AllParts();
    std::shuffle(parts.begin(), parts.end(), random);
    for (const size_t most : {0, 3}) {
      const size_t count = std::min(parts.size(), most);
      const std::vector<GrantedPart> granted(parts.begin(),
                                             parts.begin() + static_cast<int64_t>(count));
      constexpr std::chrono::milliseconds kDeadline{30};
      const Clock::time_point begin = Clock::now();
      REQUIRE(setup.Launch(path, granted, true, kDeadline) == "");
      const Clock::duration took = Clock::now() - begin;
      CHECK(took >= kDeadline);
      CHECK(took < std::chrono::seconds(10));
      CHECK(setup.words().missed[0] == 1);
      setup.words().missed[0] = 0;
      CheckMerged(path, c, setup.Merge(path), setup.Want(granted));
    }
    REQUIRE(setup.Launch(path, parts, false, kNever) == "");
    CHECK(setup.words().missed[0] == 0);
    CheckMerged(path, c, setup.Merge(path), setup.Want(parts));
  });
}
SLUICE_TEST_ON_EVERY_PATH("pullers give up an arbiter that does not answer", TestDeadline)

void TestClosed(const KernelTable& path, Random& random) {
  ForEachPullCase(random, [&](const PullCase& c, auto& setup) {
    setup.words().closed[0] = 1;
    std::vector<uint32_t> before;
    for (const PullAsk& ask : setup.words().asks) before.push_back(ask.number);
    REQUIRE(setup.Launch(path, {}, true, kNever) == "");
    for (size_t i = 0; i < before.size(); ++i) {
      CHECK(setup.words().asks[static_cast<int64_t>(i)].number == before[i]);
    }
    CHECK(setup.words().missed[0] == 0);
    CheckMerged(path, c, setup.Merge(path), setup.Want({}));
  });
}
SLUICE_TEST_ON_EVERY_PATH("pullers ask for nothing once the words are closed", TestClosed)

// MergeParts alone, in shapes and with values that attention does not give.
void TestMergeParts(const KernelTable& path, Random& random) {
  constexpr int32_t kKvHeads = 3, kRows = 4, kLists = kRows * kKvHeads;
  const Guarded<int32_t> slots = BufferOf({2, -1, 0, 5});
  for (const int32_t group : {1, 3, 7}) {
    for (const int32_t dim : {16, 80, 128}) {
      for (const int32_t most : {1, 5, 32}) {
        INFO("group " << group << ", head_dim " << dim << ", " << most << " parts");
        const int64_t items = int64_t{kLists} * most * group;
        Guarded<float> part_o = NormalBuffer<float>(items * dim, random);
        Guarded<float> part_lse = NormalBuffer<float>(items, random, 30.0f);
        for (int64_t i = 0; i < items; i += 4) part_lse[i] = kNegativeInfinity;
        std::vector<Merged> results;
        Guarded<uint32_t> drawn(kLists);
        for (uint32_t& bits : drawn) {
          bits = static_cast<uint32_t>(random() & random()) >> (32 - most);
        }
        for (const KernelTable* path_of : {&path, &Reference()}) {
          results.push_back({Guarded<float>(int64_t{kLists} * group * dim),
                             Guarded<float>(int64_t{kLists} * group)});
          Merged& to = results.back();
          Guarded<uint32_t> taken = CopyOf(drawn);
          const MergePartsParams p = {
              part_o.data(), part_lse.data(), taken.data(),     slots.data(), to.o.data(),
              to.lse.data(), kRows,           kKvHeads * group, kKvHeads,     dim,
              most};
          RunWorkers(path_of->merge_parts, p, 2);
          CHECK(to.o.Damage() + to.lse.Damage() + taken.Damage() == "");
          for (const uint32_t bits : taken) CHECK(bits == 0);
        }
        CHECK(Difference(results[0].o.span(), results[1].o.span(), 1e-6, dim) == "");
        CHECK(Difference(results[0].lse.span(), results[1].lse.span(), 1e-6, group) == "");
        for (int64_t i = 0; i < results[0].o.size(); ++i) {
          const bool padded = slots[i / (int64_t{kKvHeads} * group * dim)] < 0;
          REQUIRE(std::isnan(results[0].o[i]) == padded);
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("parts merge in their order and are wiped", TestMergeParts)

}  // namespace
}  // namespace sluice::kernels
