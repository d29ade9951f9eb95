// Tests policy ess with rows of drafts: whatever is drafted and refuted, a sequence's rows have the
// bits of one that never drafted, and miss what it misses.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>

#include "src/attention/policies/ess/ess_options.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_factory.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/latent_rig.h"
#include "tests/unit/attention/policy_rig.h"  // RelativeError

namespace sluice {
namespace {

using testing::LatentRig;
using testing::RelativeError;
using Overlap = PolicyOptions::Ess::Overlap;
using Result = std::vector<std::vector<std::vector<float>>>;

constexpr int kSlots = 3, kTotal = 400, kSteps = 60;

PolicyOptions::Ess Pools(double ratio, Overlap overlap = Overlap::kDa) {
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = ratio;
  ess.least_places = 48;
  ess.overlap = overlap;
  return ess;
}

LatentRig::Shape ShapeOf(int rows, int row_bucket) {
  LatentRig::Shape shape;
  shape.slots = kSlots;
  shape.top_k = 24;
  shape.drift = 0.2;
  shape.rows_per_sequence = rows;
  shape.row_bucket = row_bucket;
  return shape;
}

uint64_t SeedOf(int slot) { return static_cast<uint64_t>(slot) + 21; }

// Admits the slots' sequences, and ends their prompts.
void Begin(LatentRig& rig, bool hints) {
  for (int slot = 0; slot < kSlots; ++slot) {
    const int context = 150 + 40 * slot;
    REQUIRE(rig.Admit(slot, SeedOf(slot), context, kTotal));
    rig.EndPrompt(slot, hints ? rig.Hints(SeedOf(slot), context, 4) : SelectionHints{});
  }
}

// The results of a slot's positions, [layer][heads * rank] each.
using Known = std::map<std::pair<int, int>, std::vector<std::vector<float>>>;

std::vector<std::vector<float>> RowOf(const Result& result, size_t row) {
  std::vector<std::vector<float>> out;
  for (const auto& layer : result) out.push_back(layer[row]);
  return out;
}

// Returns what sequences give that never draft, of `steps` positions each.
Known WithoutDrafts(LatentRig& rig, int steps) {
  Known known;
  std::vector<int32_t> slots;
  for (int slot = 0; slot < kSlots; ++slot) slots.push_back(slot);
  for (int step = 0; step < steps; ++step) {
    std::vector<int> at;
    for (const int slot : slots) at.push_back(rig.position(slot));
    const Result got = rig.Step(slots);
    for (size_t r = 0; r < slots.size(); ++r) known[{slots[r], at[r]}] = RowOf(got, r);
  }
  return known;
}

// Runs steps with drafts, of which some are refuted, and checks the rows that count. No slot goes
// past `end` positions behind its prompt. Returns how many drafts were refuted.
int RunDrafts(LatentRig& rig, int rows, const std::vector<int>& ends, const Known& known,
              SplitMix64& random) {
  int refuted = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<int32_t> slots;
    std::vector<bool> wrong;
    std::vector<std::pair<int, int>> at;  // slot and position
    std::map<int, int> taken_back;
    for (int slot = 0; slot < kSlots; ++slot) {
      if (random.Below(5) == 0) continue;
      const int left = ends[static_cast<size_t>(slot)] - rig.position(slot);
      const int count = std::min(1 + static_cast<int>(random.Below(rows)), left);
      if (count <= 0) continue;
      const int good = 1 + static_cast<int>(random.Below(count));
      taken_back[slot] = count - good;
      for (int i = 0; i < count; ++i) {
        slots.push_back(slot);
        wrong.push_back(i >= good);
        at.emplace_back(slot, rig.position(slot) + i);
      }
    }
    if (slots.empty()) continue;
    const Result got = rig.Step(slots, wrong);
    for (size_t r = 0; r < slots.size(); ++r) {
      if (wrong[r]) continue;
      INFO("step " << step << ", slot " << at[r].first << ", position " << at[r].second);
      REQUIRE(RowOf(got, r) == known.at(at[r]));
    }
    for (const auto& [slot, count] : taken_back) {
      rig.TakeBack(slot, count);
      refuted += count;
    }
  }
  return refuted;
}

std::vector<int64_t> Missing(LatentRig& rig) {
  std::vector<int64_t> missing;
  for (const PolicyStatistics::Layer& layer : rig.policy().Statistics().layers) {
    missing.push_back(layer.missing);
  }
  return missing;
}

struct DraftCase {
  double ratio;
  Overlap overlap;
  int row_bucket;
  const char* policy = "ess";
  bool warm_up = true;
};

TEST_CASE("ess: after any drafts a sequence's rows have the bits of one that never drafted") {
  SplitMix64 random(TestSeed());
  const int rows = GENERATE(2, 4);
  const DraftCase c =
      GENERATE(DraftCase{0.1, Overlap::kNone, 0}, DraftCase{0.1, Overlap::kDa, 4},
               DraftCase{0.4, Overlap::kDba, 0}, DraftCase{0.4, Overlap::kDba, 8},
               DraftCase{0.1, Overlap::kDba, 3},
               DraftCase{0.3, Overlap::kLayerWise, 0, "ess", false}, DraftCase{1, Overlap::kDa, 4},
               DraftCase{0, Overlap::kDa, 0}, DraftCase{0.2, Overlap::kDa, 0, "offload-naive"});
  INFO(rows << " rows, ratio " << c.ratio << ", bucket " << c.row_bucket << ", " << c.policy);
  PolicyOptions::Ess ess = Pools(c.ratio, c.overlap);
  ess.warm_up = c.warm_up;
  const bool hints = random.Below(2) == 0;
  LatentRig plain(ShapeOf(rows, 0), ess, c.policy);
  LatentRig drafted(ShapeOf(rows, c.row_bucket), ess, c.policy);
  REQUIRE(drafted.policy().decode_rows_per_sequence() == rows);
  Begin(plain, hints);
  Begin(drafted, hints);
  const Known known = WithoutDrafts(plain, kSteps + 10);
  std::vector<int> ends;
  for (int slot = 0; slot < kSlots; ++slot) ends.push_back(150 + 40 * slot + kSteps);
  REQUIRE(RunDrafts(drafted, rows, ends, known, random) > 20);
  // Another one goes as far without drafts. From then on both miss the same.
  LatentRig same(ShapeOf(rows, 0), ess, c.policy);
  Begin(same, hints);
  for (int slot = 0; slot < kSlots; ++slot) {
    while (same.position(slot) < drafted.position(slot)) {
      const int at = same.position(slot);
      REQUIRE(RowOf(same.Step({slot}), 0) == known.at({slot, at}));
    }
  }
  std::vector<int64_t> missed = Missing(drafted), wanted = Missing(same);
  for (int step = 0; step < 8; ++step) {
    REQUIRE(drafted.Step({0, 1, 2}) == same.Step({0, 1, 2}));
    const std::vector<int64_t> now = Missing(drafted), then = Missing(same);
    for (size_t layer = 0; layer < now.size(); ++layer) {
      REQUIRE(now[layer] - missed[layer] == then[layer] - wanted[layer]);
    }
    missed = now;
    wanted = then;
  }
}

TEST_CASE("ess: rows with drafts attend to what their indexer selects") {
  LatentRig rig(ShapeOf(4, 0), Pools(0.1));
  Begin(rig, true);
  for (int step = 0; step < 12; ++step) {
    const int at = rig.position(1);
    const Result got = rig.Step({0, 1, 1, 1, 1, 2, 2});
    for (size_t layer = 0; layer < got.size(); ++layer) {
      for (int i = 0; i < 4; ++i) {
        const std::vector<float> want = rig.Naive(SeedOf(1), static_cast<int>(layer), at + i);
        REQUIRE(RelativeError(got[layer][1 + static_cast<size_t>(i)], want) < 1e-5);
      }
    }
  }
}

// The pools' sizes decide the bits, and a node with drafts has no other sizes where they are
// enough.
TEST_CASE("ess: a node that may draft gives the bits of one that may not") {
  LatentRig plain(ShapeOf(1, 0), Pools(0.4)), drafts(ShapeOf(4, 0), Pools(0.4));
  Begin(plain, true);
  Begin(drafts, true);
  for (int step = 0; step < 20; ++step) {
    REQUIRE(plain.Step({0, 1, 2}) == drafts.Step({0, 1, 2}));
  }
}

TEST_CASE("ess: a slot's next sequence takes back nothing of the one before") {
  LatentRig rig(ShapeOf(4, 0), Pools(0.1)), fresh(ShapeOf(4, 0), Pools(0.1));
  Begin(rig, true);
  rig.Step({0, 0, 0, 0, 1, 2}, {false, true, true, true, false, false});
  rig.policy().Release(0);
  for (LatentRig* one : {&rig, &fresh}) {
    REQUIRE(one->Admit(0, 99, 100, kTotal));  // begins before the positions of the one before
    one->EndPrompt(0);
  }
  for (int step = 0; step < 10; ++step) REQUIRE(rig.Step({0, 0}) == fresh.Step({0, 0}));
}

TEST_CASE("ess: a sequence is kept without its refuted drafts") {
  LatentRig drafted(ShapeOf(4, 0), Pools(0.1)), plain(ShapeOf(4, 0), Pools(0.1));
  for (LatentRig* rig : {&drafted, &plain}) {
    REQUIRE(rig->Admit(0, 7, 0, 300, 134));  // its prompt is computed here
    for (const int count : {64, 64, 6}) rig->Prompt(0, count);
    rig->EndPrompt(0);
  }
  for (int step = 0; step < 10; ++step) plain.Step({0});
  for (int step = 0; step < 5; ++step) {
    drafted.Step({0, 0, 0, 0}, {false, false, true, true});
    drafted.TakeBack(0, 2);
  }
  const int length = plain.position(0);
  REQUIRE(drafted.position(0) == length);
  for (LatentRig* rig : {&drafted, &plain}) {
    rig->AwaitWarm(0);
    REQUIRE(rig->policy().ReserveHostCopy(0, length, {}));
    rig->policy().Evict(0, length);
    rig->AwaitWarm(0);
    rig->Readmit(1, 7, length, 350, length + 10, rig->policy().DetachHostCache(0));
    rig->Prompt(1, 10);
    rig->EndPrompt(1);
  }
  for (int step = 0; step < 20; ++step) REQUIRE(drafted.Step({1}) == plain.Step({1}));
}

TEST_CASE("ess: a transfer lost under several rows ends their sequence alone") {
  LatentRig rig(ShapeOf(4, 0), Pools(0.1)), well(ShapeOf(4, 0), Pools(0.1));
  Begin(rig, true);
  Begin(well, true);
  const std::vector<int32_t> slots = {0, 0, 0, 1, 1, 2};
  const std::vector<bool> wrong = {false, true, true, false, false, false};
  const Result want = well.Step(slots, wrong);
  Result got;
  {
    const ScopedFailpoints lost("attention.gather=error*1");
    got = rig.Step(slots, wrong);
  }
  REQUIRE(absl::IsInternal(rig.policy().SlotHealth(0)));
  for (const int slot : {1, 2}) REQUIRE(rig.policy().SlotHealth(slot).ok());
  rig.policy().Release(0);
  well.TakeBack(0, 2);
  for (size_t row = 3; row < slots.size(); ++row) REQUIRE(RowOf(got, row) == RowOf(want, row));
  const Result next = rig.Step({1, 1, 2}), same = well.Step({1, 1, 2});
  REQUIRE(next == same);
}

TEST_CASE("ess: a pool has a place for all that a step with drafts selects") {
  EssPoolShape shape;
  shape.top_k = 32;
  shape.block_tokens = 1;
  shape.max_context = 1000;
  for (const int64_t rows : {1, 2, 4}) {
    shape.rows = rows;
    REQUIRE(shape.NeededPlaces(1000) == (rows == 1 ? 33 : 33 * rows + 1));
    REQUIRE(shape.NeededPlaces(20) == 21);
    REQUIRE(shape.PlacesOf(1000) == shape.NeededPlaces(1000));
    REQUIRE(shape.HoldsAllWhole() == false);
    shape.max_context = 33 * rows;
    REQUIRE(shape.HoldsAllWhole() == (rows > 1));
    shape.max_context = 1000;
  }
}

TEST_CASE("ess: what does not go with drafts is refused by name") {
  LatentRig rig(ShapeOf(1, 0), Pools(0.2));
  PolicyOptions options = rig.Options();
  const auto refusal = [&] { return std::string(NewPolicy(options).status().message()); };
  options.rows_per_sequence = 4;
  options.ess.prefetch = 8;
  REQUIRE(refusal().starts_with("ess_prefetch: 8 entries"));
  options.ess.prefetch = 0;
  REQUIRE(refusal().empty());
  options.rows_per_sequence = 18;
  REQUIRE(refusal().starts_with("speculation_tokens: expected at most 15"));
  options.name = "offload-naive";
  options.rows_per_sequence = 5;
  REQUIRE(refusal().starts_with("speculation_tokens: expected at most 3"));
}

// HBM is divided among kinds as sequences without drafts take it.
TEST_CASE("ess: drafts that keep the longest sequence out of HBM are refused by name") {
  LatentRig::Shape shape = ShapeOf(1, 0);
  shape.pool_bytes = size_t{1200} << 10;
  LatentRig rig(shape, Pools(0.1));
  REQUIRE(rig.policy().max_tokens() == shape.max_context);
  PolicyOptions options = rig.Options();
  options.rows_per_sequence = 16;
  const absl::Status refused = NewPolicy(options).status();
  REQUIRE(absl::IsInvalidArgument(refused));
  REQUIRE(std::string(refused.message())
              .starts_with("speculation_tokens: a step with 15 drafts of a sequence needs 401 KV "
                           "slots in each layer"));
}

}  // namespace
}  // namespace sluice
