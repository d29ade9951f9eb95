// Tests policy ess where things go wrong: transfers that are lost or late, hints that make no
// sense, and pages that come and go beside running sequences.
#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/synchronization/notification.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/latent_rig.h"
#include "tests/unit/attention/policy_rig.h"  // RelativeError

namespace sluice {
namespace {

using testing::LatentRig;
using testing::RelativeError;
using Result = std::vector<std::vector<std::vector<float>>>;

PolicyOptions::Ess SmallPools(double ratio = 0.2, int64_t least_places = 48) {
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = ratio;
  ess.least_places = least_places;
  ess.overlap = PolicyOptions::Ess::Overlap::kDa;
  return ess;
}

void CheckRow(LatentRig& rig, const Result& got, size_t row, uint64_t seed, int position) {
  for (size_t layer = 0; layer < got.size(); ++layer) {
    INFO("layer " << layer << ", stream " << seed << ", position " << position);
    const std::vector<float> want = rig.Naive(seed, static_cast<int>(layer), position);
    REQUIRE(RelativeError(got[layer][row], want) < 1e-5);  // NaN fails this too
  }
}

// Checks that nothing is promised or taken in any tier.
void CheckEmpty(LatentRig& rig) {
  for (PagePool* pool : {&rig.hbm(), &rig.dram()}) {
    for (size_t kind = 0; kind < pool->layout().kinds.size(); ++kind) {
      REQUIRE(pool->UsageOf(kind).reserved_bytes == 0);
      REQUIRE(pool->UsageOf(kind).used_bytes == 0);
    }
  }
}

TEST_CASE("ess: no step waits for the lists of a warm-up") {
  LatentRig rig({}, SmallPools());
  REQUIRE(rig.Admit(0, 1, 150, 300));
  rig.EndPrompt(0);
  rig.AwaitWarm(0);
  REQUIRE(rig.Admit(1, 2, 200, 300));
  absl::Notification go_on;
  SetFailpointSleep([&go_on](absl::Duration) { go_on.WaitForNotification(); });
  {
    const ScopedFailpoints slow("attention.warm_up=delay(1s)*1");
    rig.EndPrompt(1, rig.Hints(2, 200, 4));  // would hang here if this thread made them
    for (int step = 0; step < 4; ++step) {
      const int at = rig.position(0);
      CheckRow(rig, rig.Step({0}), 0, 1, at);
    }
    REQUIRE_FALSE(rig.policy().Warm(1));
    REQUIRE_FALSE(rig.policy().WarmEvent(1).Ready());
    go_on.Notify();
    rig.AwaitWarm(1);
  }
  SetFailpointSleep(nullptr);
  const int at = rig.position(1);
  CheckRow(rig, rig.Step({0, 1}), 1, 2, at);
}

// Runs two sequences' steps, of which the second is hit by `term` before step `when` (0: before it
// is warmed). Returns what the first one gives.
std::vector<Result> RunBeside(const std::string& term, int when) {
  LatentRig rig({}, SmallPools());
  REQUIRE(rig.Admit(1, 7, 150, 300));
  rig.EndPrompt(1, rig.Hints(7, 150, 4));
  rig.AwaitWarm(1);
  std::vector<Result> rows;
  const auto hit = [&] { REQUIRE((term.empty() || ArmFailpoints(term).ok())); };
  REQUIRE(rig.Admit(0, 8, 120, 300));
  if (when == 0) hit();
  rig.EndPrompt(0, rig.Hints(8, 120, 4));
  rig.AwaitWarm(0);
  bool ended = false;
  for (int step = 1; step < 8; ++step) {
    if (step == when) hit();
    const Result got = rig.Step(ended ? std::vector<int32_t>{1} : std::vector<int32_t>{0, 1});
    Result& row = rows.emplace_back();
    for (const auto& layer : got) row.push_back({layer.back()});
    REQUIRE(rig.policy().SlotHealth(1).ok());
    if (ended) continue;
    const absl::Status health = rig.policy().SlotHealth(0);
    REQUIRE(health.ok() == (term.empty() || step < when));
    if (health.ok()) continue;
    REQUIRE(absl::IsInternal(health));
    REQUIRE(ReasonOf(health) == "TRANSFER_FAILED");
    rig.policy().Release(0);  // as the engine does
    ended = true;
  }
  DisarmFailpoints();
  // The slot serves the next sequence, with the same tokens.
  if (ended) {
    REQUIRE(rig.Admit(0, 8, 120, 300));
    REQUIRE(rig.policy().SlotHealth(0).ok());
    rig.EndPrompt(0, rig.Hints(8, 120, 4));
    for (int step = 0; step < 4; ++step) {
      const int at = rig.position(0);
      CheckRow(rig, rig.Step({0}), 0, 8, at);
      REQUIRE(rig.policy().SlotHealth(0).ok());
    }
  }
  for (const int slot : {0, 1}) rig.policy().Release(slot);
  CheckEmpty(rig);
  return rows;
}

TEST_CASE("ess: a transfer that is lost ends its own sequence, and the others give the same bits") {
  const std::vector<Result> want = RunBeside("", -1);
  REQUIRE(RunBeside("attention.warm_up=error*1", 0) == want);
  REQUIRE(RunBeside("attention.gather=error*1", 1) == want);
  REQUIRE(RunBeside("attention.gather=error*1", 5) == want);
}

// Draws hints that name anything.
SelectionHints Nonsense(SplitMix64& random, int layers) {
  SelectionHints hints;
  const uint32_t units[] = {0, 1, 2, 16, 32};
  hints.unit_tokens = units[random.Below(5)];
  const auto entries = random.Below(20);
  for (uint64_t i = 0; i < entries; ++i) {
    SelectionHints::Entry entry;
    entry.layer = static_cast<uint32_t>(random.Below(4) == 0 ? random() : random.Below(layers));
    if (random.Below(3) == 0) entry.kv_head = static_cast<uint32_t>(random.Below(3));
    if (random.Below(3) > 0) entry.position = static_cast<uint32_t>(random.Below(600));
    const auto count = random.Below(5) == 0 ? 2000 : random.Below(60);
    for (uint64_t u = 0; u < count; ++u) {  // in no order, some twice, some of no sequence
      entry.units.push_back(
          static_cast<uint32_t>(random.Below(8) == 0 ? random() : random.Below(400)));
    }
    hints.entries.push_back(std::move(entry));
  }
  return hints;
}

constexpr uint8_t kPoison = 0xFF;  // NaN, and page -1

// A slot's pages go back in Release and DetachHostCache, which come after the
// slot's last step and its copies, and only its own rows read its tables. Here every free page is
// poison while steps and warm-ups run; none of it reaches a result, and none is written.
TEST_CASE("ess: no gather and no write meets a page that was given back") {
  for (const uint64_t seed : {1, 2, 3}) {
    SplitMix64 random(seed);
    LatentRig::Shape shape;
    shape.layers = 2;
    shape.drift = 0.1;
    LatentRig rig(shape, SmallPools(0.15));
    std::map<int, uint64_t> streams;  // by slot
    std::map<int, int> totals;
    int ended = 0, rows = 0;
    for (int round = 0; round < 40; ++round) {
      const auto slot = static_cast<int>(random.Below(3));
      if (!streams.contains(slot)) {
        const int context = 20 + static_cast<int>(random.Below(150));
        const int total = context + 10 + static_cast<int>(random.Below(120));
        const uint64_t stream = seed * 100 + static_cast<uint64_t>(round);
        if (rig.Admit(slot, stream, context, total)) {
          streams[slot] = stream;
          totals[slot] = total;
          rig.EndPrompt(slot, Nonsense(random, shape.layers));
        }
      } else if (random.Below(2) == 0) {
        rig.AwaitWarm(slot);
        if (random.Below(2) == 0) {
          rig.policy().Release(slot);
        } else {
          REQUIRE(rig.policy().ReserveHostCopy(slot, rig.position(slot), {}));
          rig.policy().Evict(slot, rig.position(slot));
          rig.AwaitWarm(slot);
          REQUIRE(rig.policy().DetachHostCache(slot) != nullptr);  // and nobody wants it
        }
        streams.erase(slot);
        ++ended;
      }
      for (const auto& [one, stream] : streams) rig.AwaitWarm(one);
      for (PagePool* pool : {&rig.hbm(), &rig.dram()}) {
        for (const absl::Span<uint8_t> free : pool->FreeMemory()) {
          std::fill(free.begin(), free.end(), kPoison);
        }
      }
      std::vector<int32_t> slots;
      std::vector<int> at;
      for (const auto& [one, stream] : streams) {
        if (rig.position(one) >= totals[one]) continue;
        slots.push_back(one);
        at.push_back(rig.position(one));
      }
      if (slots.empty()) continue;
      const Result got = rig.Step(slots);
      rows += static_cast<int>(slots.size());
      for (size_t r = 0; r < slots.size(); ++r) {
        CheckRow(rig, got, r, streams[slots[r]], at[r]);
      }
      for (PagePool* pool : {&rig.hbm(), &rig.dram()}) {
        for (const absl::Span<uint8_t> free : pool->FreeMemory()) {
          REQUIRE(std::all_of(free.begin(), free.end(), [](uint8_t b) { return b == kPoison; }));
        }
      }
    }
    REQUIRE(ended > 5);
    REQUIRE(rows > 30);
    for (const auto& [slot, stream] : streams) {
      rig.AwaitWarm(slot);
      rig.policy().Release(slot);
    }
    CheckEmpty(rig);
  }
}

TEST_CASE("ess: pools of any ratio, for contexts below, at and above them") {
  SplitMix64 random(11);
  for (const double ratio : {0.05, 0.1, 0.3, 0.6, 1.0, 0.0}) {
    for (const int64_t least : {0, 48, 90}) {
      LatentRig::Shape shape;
      shape.layers = 1;
      shape.drift = 0.2;
      LatentRig rig(shape, SmallPools(ratio, least));
      // One context ends below its pool, one begins at it, one outgrows it.
      const int contexts[] = {1 + static_cast<int>(random.Below(20)), 48,
                              30 + static_cast<int>(random.Below(120))};
      for (int slot = 0; slot < 3; ++slot) {
        const auto stream = static_cast<uint64_t>(slot) + 20;
        REQUIRE(rig.Admit(slot, stream, contexts[slot], contexts[slot] + 40 * slot + 24));
        rig.EndPrompt(slot, slot == 1 ? rig.Hints(stream, contexts[slot], 4) : SelectionHints());
      }
      for (int step = 0; step < 24; ++step) {
        const std::vector<int> at = {rig.position(0), rig.position(1), rig.position(2)};
        const Result got = rig.Step({0, 1, 2});
        if (step % 8 != 7 && step != 0) continue;
        INFO("ratio " << ratio << ", at least " << least << " places, step " << step);
        for (size_t r = 0; r < 3; ++r) CheckRow(rig, got, r, r + 20, at[r]);
      }
    }
  }
}

TEST_CASE("ess: what was selected and missed is known while steps go on, some steps late") {
  LatentRig rig({}, SmallPools());
  for (const PolicyStatistics::Layer& layer : rig.policy().Recent().layers) {
    REQUIRE(layer.selected == 0);
  }
  REQUIRE(rig.Admit(0, 1, 150, 300));
  REQUIRE(rig.Admit(1, 2, 150, 300));
  for (const int slot : {0, 1}) rig.EndPrompt(slot, rig.Hints(1, 150, 4));
  for (int step = 0; step < 70; ++step) rig.Step({0, 1});
  const PolicyStatistics recent = rig.policy().Recent(), now = rig.policy().Statistics();
  REQUIRE(recent.layers.size() == now.layers.size());
  for (size_t layer = 0; layer < now.layers.size(); ++layer) {
    const PolicyStatistics::Layer &then = recent.layers[layer], &sums = now.layers[layer];
    REQUIRE(then.steps >= 2 * 32);
    REQUIRE(then.steps <= sums.steps);
    REQUIRE(then.selected == then.steps * 32);
    REQUIRE(then.missing > 0);
    REQUIRE(then.missing <= sums.missing);
    REQUIRE(then.recalled == then.missing);
  }
}

TEST_CASE("ess: a kept sequence holds DRAM for the tokens that it has") {
  LatentRig rig({}, SmallPools());
  const CacheLayout& layout = rig.dram().layout();
  REQUIRE(rig.Admit(0, 4, 100, 500));
  rig.EndPrompt(0);
  for (int step = 0; step < 12; ++step) rig.Step({0});
  rig.AwaitWarm(0);
  REQUIRE(rig.dram().UsageOf(0).reserved_bytes ==
          layout.PagesFor(0, 500) * layout.kinds[0].page_bytes());
  REQUIRE(rig.policy().ReserveHostCopy(0, 111, {}));
  rig.policy().Evict(0, 111);
  rig.AwaitWarm(0);
  std::unique_ptr<SequenceCache> home = rig.policy().DetachHostCache(0);
  for (size_t kind = 0; kind < 2; ++kind) {
    const int64_t bytes = layout.PagesFor(kind, 111) * layout.kinds[kind].page_bytes();
    REQUIRE(rig.dram().UsageOf(kind).reserved_bytes == bytes);
    REQUIRE(rig.dram().UsageOf(kind).used_bytes == bytes);
  }
  // A next turn takes what it needs from what is left.
  rig.Readmit(1, 4, 111, 300, 112, std::move(home));
  rig.Prompt(1, 1);
  rig.EndPrompt(1);
  for (int step = 0; step < 6; ++step) {
    const int at = rig.position(1);
    CheckRow(rig, rig.Step({1}), 0, 4, at);
  }
  rig.AwaitWarm(1);
  REQUIRE(rig.dram().UsageOf(1).reserved_bytes == 0);
  rig.policy().Release(1);
  CheckEmpty(rig);
}

}  // namespace
}  // namespace sluice
