#include "src/attention/policies/full/full_policy.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/cpu/host_stream.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 3;
constexpr int kSlots = 4;

struct Tiers {
  explicit Tiers(double overcommit = 1) {
    CacheKind kv;
    kv.name = "kv";
    kv.heads = 2;
    kv.block_tokens = 16;
    kv.SetEqualParts(2, 2 * 16 * 2);
    const CacheLayout layout{kLayers, {kv}};
    device = *NewCpuDevice({"portable", 1});
    hbm = *PagePool::Create("hbm", layout, *device->Allocate(MemoryKind::kDevice, 1 << 20, "hbm"),
                            overcommit);
    dram =
        *PagePool::Create("dram", layout, *device->Allocate(MemoryKind::kPinned, 1 << 20, "dram"));
    policy = *NewFullPolicy({device.get(), hbm.get(), kSlots, 1024, dram.get()});
  }
  // A home of `tokens` tokens whose bytes say where they belong.
  std::unique_ptr<SequenceCache> Home(int64_t tokens, uint8_t mark) {
    auto home = std::make_unique<SequenceCache>(dram.get(), dram->TryReserve(tokens));
    home->EnsureTokens(tokens);
    ForEachBlock(tokens, [&](int layer, int head, int64_t block) {
      std::memset(home->BlockAddress(layer, 0, head, block), Byte(layer, head, block, mark),
                  static_cast<size_t>(hbm->layout().kinds[0].block_bytes()));
    });
    return home;
  }
  void CheckResident(int slot, int64_t tokens, uint8_t mark) {
    ForEachBlock(tokens, [&](int layer, int head, int64_t block) {
      const uint8_t* at = policy->resident(slot).BlockAddress(layer, 0, head, block);
      const auto bytes = hbm->layout().kinds[0].block_bytes();
      for (int64_t i = 0; i < bytes; ++i) REQUIRE(at[i] == Byte(layer, head, block, mark));
    });
  }
  template <typename Visit>
  void ForEachBlock(int64_t tokens, Visit visit) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int64_t block = 0; block < hbm->layout().kinds[0].BlocksFor(tokens); ++block) {
          visit(layer, head, block);
        }
      }
    }
  }
  static uint8_t Byte(int layer, int head, int64_t block, uint8_t mark) {
    return static_cast<uint8_t>(mark + layer * 61 + head * 29 + block * 7);
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<FullPolicy> policy;
};

TEST_CASE("an admitted sequence has its caches in HBM, and its home is given up when it is warm") {
  Tiers t;
  std::unique_ptr<SequenceCache> home = t.Home(100, 1);
  REQUIRE(t.policy->Admit(0, 100, 300, Promise::kFirm, home));
  CHECK(home == nullptr);
  t.policy->WarmEvent(0).Wait();
  CHECK(t.policy->Warm(0));
  t.CheckResident(0, 100, 1);
  CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
  t.policy->Release(0);
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
}

TEST_CASE("whatever comes and goes, scattered pages hold each sequence's own bytes") {
  Tiers t;
  SplitMix64 random(TestSeed());
  const std::unique_ptr<Stream> stream = t.device->NewStream(Device::StreamKind::kCompute);
  const std::unique_ptr<Event> grown = t.device->NewEvent();
  int64_t context[kSlots] = {};
  for (int round = 0; round < 400; ++round) {
    const auto slot = static_cast<int>(random.Below(kSlots));
    const auto mark = static_cast<uint8_t>(slot * 50);
    if (context[slot] != 0) {
      t.CheckResident(slot, context[slot], mark);
      t.policy->Release(slot);
      context[slot] = 0;
      continue;
    }
    const auto tokens = static_cast<int64_t>(1 + random.Below(400));
    std::unique_ptr<SequenceCache> home = t.Home(tokens, mark);
    REQUIRE(t.policy->Admit(slot, tokens, tokens + 200, Promise::kFirm, home));
    t.policy->WarmEvent(slot).Wait();
    REQUIRE(t.policy->Warm(slot));
    t.policy->Grow(slot, tokens + static_cast<int64_t>(random.Below(200)));
    t.policy->BeginStep(*stream, {slot}, {0});
    stream->Record(*grown);
    grown->Wait();
    context[slot] = tokens;
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    if (context[slot] != 0) t.policy->Release(slot);
  }
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
  CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
}

// Runs everything at once, and counts it.
class CountingStream : public HostStream {
 public:
  void Record(Event&) override {}  // an event that was never recorded is ready
  void WaitFor(Event& event) override { event.Wait(); }

  int commands = 0;

 private:
  Command& NextSlot() override { return command_; }
  void Publish() override {
    ++commands;
    command_.run(command_.payload, &team_);
  }

  CpuTeam team_{1};
  Command command_{};
};

TEST_CASE("the device is told of all that grew in one command, by the step that has their rows") {
  Tiers t;
  CountingStream stream;
  std::unique_ptr<SequenceCache> none;
  for (int slot = 0; slot < 3; ++slot) {
    REQUIRE(t.policy->Admit(slot, 0, 600, Promise::kFirm, none));
    t.policy->WarmEvent(slot).Wait();
    REQUIRE(t.policy->Grow(slot, 1));
  }
  CHECK(stream.commands == 0);
  t.policy->BeginStep(stream, {0, 2, 2}, {0, 0, 1});
  CHECK(stream.commands == 1);
  t.policy->BeginStep(stream, {0, 2}, {1, 2});  // nothing grew since
  CHECK(stream.commands == 1);
  t.policy->BeginStep(stream, {1}, {0});
  CHECK(stream.commands == 2);
  // Growth comes in large extents: in most steps there is nothing to tell.
  for (int tokens = 2; tokens <= 600; ++tokens) {
    for (int slot = 0; slot < 3; ++slot) REQUIRE(t.policy->Grow(slot, tokens));
    t.policy->BeginStep(stream, {0, 1, 2}, {tokens - 1, tokens - 1, tokens - 1});
  }
  CHECK(stream.commands > 2);
  CHECK(stream.commands <= 2 + 600 / (SequenceCache::kGrowthBlocks * 16) + 1);
  // Who leaves before a step had its rows leaves nothing to tell.
  t.policy->Release(0);
  REQUIRE(t.policy->Admit(0, 0, 600, Promise::kFirm, none));
  t.policy->WarmEvent(0).Wait();
  REQUIRE(t.policy->Grow(0, 1));
  t.policy->Release(0);
  const int before = stream.commands;
  t.policy->BeginStep(stream, {0, 1, 2}, {0, 600, 600});
  CHECK(stream.commands == before);
  for (int slot = 1; slot < 3; ++slot) t.policy->Release(slot);
}

TEST_CASE("what does not fit is not admitted, and its home stays with the caller") {
  Tiers t;
  const int64_t most = t.policy->max_tokens();
  std::unique_ptr<SequenceCache> none;
  REQUIRE(t.policy->Admit(0, 0, most, Promise::kFirm, none));
  std::unique_ptr<SequenceCache> home = t.Home(10, 1);
  CHECK_FALSE(t.policy->Admit(1, 10, 20, Promise::kFirm, home));
  CHECK(home != nullptr);
  t.policy->WarmEvent(0).Wait();
  t.policy->Release(0);
  CHECK(t.policy->Admit(1, 10, 20, Promise::kFirm, home));
  t.policy->WarmEvent(1).Wait();
  CHECK(t.policy->Warm(1));
  t.policy->Release(1);
}

TEST_CASE("a sequence with a soft promise goes to DRAM and comes back with its bytes") {
  Tiers t(2.0);
  const int64_t most = t.policy->max_tokens();
  const std::unique_ptr<Stream> stream = t.device->NewStream(Device::StreamKind::kCompute);
  std::unique_ptr<SequenceCache> none;
  REQUIRE(t.policy->Admit(0, 0, most, Promise::kFirm, none));
  std::unique_ptr<SequenceCache> home = t.Home(100, 1);
  CHECK_FALSE(t.policy->Admit(1, 100, 300, Promise::kFirm, home));
  REQUIRE(t.policy->Admit(1, 100, 300, Promise::kSoft, home));
  t.policy->WarmEvent(1).Wait();
  REQUIRE(t.policy->Warm(1));
  // Its way out is kept.
  CHECK(t.dram->UsageOf(0).reserved_bytes == t.hbm->layout().BytesFor(300));
  CHECK_FALSE(t.policy->MakeFirm(1));
  // The firm one grows until pages are lacking; then the other one leaves.
  CHECK_FALSE(t.policy->Grow(0, most));
  for (int round = 0; round < 3; ++round) {
    t.policy->Evict(1, 100);
    t.policy->WarmEvent(1).Wait();
    REQUIRE(t.policy->Warm(1));
    home = t.policy->TakeHome(1);
    REQUIRE(home != nullptr);
    CHECK(t.hbm->UsageOf(0).used_bytes == 0);
    // Into another slot; its home is its way out again, whatever else DRAM holds.
    std::unique_ptr<SequenceCache> other = t.Home(t.dram->RoomNow().firm_tokens.least(), 9);
    REQUIRE(t.policy->Admit(1 + round, 100, 300, Promise::kSoft, home));
    t.policy->WarmEvent(1 + round).Wait();
    REQUIRE(t.policy->Warm(1 + round));
    t.CheckResident(1 + round, 100, 1);
    if (round == 2) break;
    t.policy->Evict(1 + round, 100);
    t.policy->WarmEvent(1 + round).Wait();
    home = t.policy->TakeHome(1 + round);
    REQUIRE(t.policy->Admit(1, 100, 300, Promise::kSoft, home));
    t.policy->WarmEvent(1).Wait();
    REQUIRE(t.policy->Warm(1));
  }
  t.policy->Release(0);
  CHECK(t.policy->MakeFirm(3));
  CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
  t.policy->Release(3);
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
}

TEST_CASE("a soft promise needs room in DRAM, and a sequence without caches has no home") {
  Tiers t(2.0);
  std::unique_ptr<SequenceCache> all = t.Home(t.dram->capacity_tokens(), 1);
  std::unique_ptr<SequenceCache> none;
  CHECK_FALSE(t.policy->Admit(0, 0, 100, Promise::kSoft, none));
  all.reset();
  REQUIRE(t.policy->Admit(0, 0, 100, Promise::kSoft, none));
  t.policy->WarmEvent(0).Wait();
  t.policy->Evict(0, 0);
  t.policy->WarmEvent(0).Wait();
  REQUIRE(t.policy->Warm(0));
  CHECK(t.policy->TakeHome(0) == nullptr);
  CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
}

}  // namespace
}  // namespace sluice
