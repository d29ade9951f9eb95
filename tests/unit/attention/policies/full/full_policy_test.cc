#include "src/attention/policies/full/full_policy.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/cpu/host_stream.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 3;
constexpr int kSlots = 4;

CacheLayout KeysAndValues() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = 2;
  kv.block_tokens = 16;
  kv.SetEqualParts(2, 2 * 16 * 2);
  return {kLayers, {kv}};
}

// Latent caches: two kinds, one of unequal parts, and blocks of different sizes.
CacheLayout Latents() {
  CacheKind latent, index;
  latent.name = "latent";
  latent.element_type = DType::kFloat8E4M3;
  latent.heads = 1;
  latent.block_tokens = 16;
  latent.SetEqualParts(1, 656);
  index.name = "index";
  index.element_type = DType::kFloat8E4M3;
  index.heads = 1;
  index.block_tokens = 32;
  index.part_bytes = {128, 4};
  index.bytes_per_token = 132;
  return {kLayers, {latent, index}};
}

struct Tiers {
  explicit Tiers(double overcommit = 1, const CacheLayout& layout = KeysAndValues()) {
    device = *NewCpuDevice({"portable", 1});
    // Tokens enough for the tests, whatever they take.
    const auto bytes = static_cast<size_t>(layout.BytesFor(2700)) + (8 << 10);
    hbm = *PagePool::Create("hbm", layout, *device->Allocate(MemoryKind::kDevice, bytes, "hbm"),
                            overcommit);
    dram = *PagePool::Create("dram", layout, *device->Allocate(MemoryKind::kPinned, bytes, "dram"));
    PolicyOptions options = PolicyOver(device.get(), hbm.get(), kSlots, 1024, dram.get());
    options.heads = 2;
    options.latent_rank = 512;
    options.index_top_k = layout.kinds.size() > 1 ? 64 : 0;
    options.max_rows = 32;
    policy = *NewFullPolicy(options);
  }
  // Makes a host cache of `tokens` tokens whose bytes encode where they belong.
  std::unique_ptr<SequenceCache> Home(int64_t tokens, uint8_t mark) {
    auto home = std::make_unique<SequenceCache>(dram.get(), dram->TryReserve(tokens));
    home->EnsureTokens(tokens);
    ForEachBlock(tokens, [&](int layer, size_t kind, int head, int64_t block) {
      std::memset(home->BlockAddress(layer, kind, head, block),
                  Byte(layer, kind, head, block, mark),
                  static_cast<size_t>(hbm->layout().kinds[kind].block_bytes()));
    });
    return home;
  }
  void CheckResident(int slot, int64_t tokens, uint8_t mark) {
    ForEachBlock(tokens, [&](int layer, size_t kind, int head, int64_t block) {
      const uint8_t* at = policy->resident(slot).BlockAddress(layer, kind, head, block);
      const auto bytes = hbm->layout().kinds[kind].block_bytes();
      const uint8_t wanted = Byte(layer, kind, head, block, mark);
      REQUIRE(std::count(at, at + bytes, wanted) == bytes);
    });
  }
  template <typename Visit>
  void ForEachBlock(int64_t tokens, Visit visit) {
    const std::vector<CacheKind>& kinds = hbm->layout().kinds;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (size_t kind = 0; kind < kinds.size(); ++kind) {
        for (int head = 0; head < kinds[kind].heads; ++head) {
          for (int64_t block = 0; block < kinds[kind].BlocksFor(tokens); ++block) {
            visit(layer, kind, head, block);
          }
        }
      }
    }
  }
  static uint8_t Byte(int layer, size_t kind, int head, int64_t block, uint8_t mark) {
    return static_cast<uint8_t>(mark + layer * 61 + static_cast<int>(kind) * 113 + head * 29 +
                                block * 7);
  }
  // Return bytes of all kinds.
  static int64_t Reserved(const PagePool& pool) {
    return Sum(pool, &PagePool::Usage::reserved_bytes);
  }
  static int64_t Used(const PagePool& pool) { return Sum(pool, &PagePool::Usage::used_bytes); }
  static int64_t Sum(const PagePool& pool, int64_t PagePool::Usage::*bytes) {
    int64_t sum = 0;
    for (size_t kind = 0; kind < pool.layout().kinds.size(); ++kind) {
      sum += pool.UsageOf(kind).*bytes;
    }
    return sum;
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<FullPolicy> policy;
};

TEST_CASE("a policy offers the form of attention that its caches need, and is refused for others") {
  Tiers keys_and_values, latents(1, Latents());
  CHECK(keys_and_values.policy->kv_attention() != nullptr);
  CHECK(keys_and_values.policy->latent_attention() == nullptr);
  CHECK(latents.policy->kv_attention() == nullptr);
  CHECK(latents.policy->latent_attention() != nullptr);
  CHECK(CheckAttends(*keys_and_values.policy, KeysAndValues()).ok());
  CHECK(CheckAttends(*latents.policy, Latents()).ok());
  CHECK(absl::IsInvalidArgument(CheckAttends(*keys_and_values.policy, Latents())));
  CHECK(absl::IsInvalidArgument(CheckAttends(*latents.policy, KeysAndValues())));
}

TEST_CASE("an admitted sequence has its caches in HBM, and its home is given up when it is warm") {
  const bool latents = GENERATE(false, true);
  Tiers t(1, latents ? Latents() : KeysAndValues());
  std::unique_ptr<SequenceCache> home = t.Home(100, 1);
  REQUIRE(t.policy->Admit(0, 100, 300, Promise::kFirm, home));
  CHECK(home == nullptr);
  t.policy->WarmEvent(0).Wait();
  CHECK(t.policy->Warm(0));
  t.CheckResident(0, 100, 1);
  CHECK(Tiers::Reserved(*t.dram) == 0);
  t.policy->Release(0);
  CHECK(Tiers::Reserved(*t.hbm) == 0);
}

TEST_CASE("whatever comes and goes, scattered pages hold each sequence's own bytes") {
  const bool latents = GENERATE(false, true);
  Tiers t(1, latents ? Latents() : KeysAndValues());
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
  CHECK(Tiers::Reserved(*t.hbm) == 0);
  CHECK(Tiers::Reserved(*t.dram) == 0);
}

// A stream that runs everything at once and counts it.
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
  // Growth comes in large extents, so most steps have nothing to send.
  for (int tokens = 2; tokens <= 600; ++tokens) {
    for (int slot = 0; slot < 3; ++slot) REQUIRE(t.policy->Grow(slot, tokens));
    t.policy->BeginStep(stream, {0, 1, 2}, {tokens - 1, tokens - 1, tokens - 1});
  }
  CHECK(stream.commands > 2);
  CHECK(stream.commands <= 2 + 600 / (SequenceCache::kGrowthBlocks * 16) + 1);
  // A sequence that leaves before a step had its rows leaves nothing to send.
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
  const bool latents = GENERATE(false, true);
  Tiers t(2.0, latents ? Latents() : KeysAndValues());
  const int64_t most = t.policy->max_tokens();
  const std::unique_ptr<Stream> stream = t.device->NewStream(Device::StreamKind::kCompute);
  std::unique_ptr<SequenceCache> none;
  REQUIRE(t.policy->Admit(0, 0, most, Promise::kFirm, none));
  std::unique_ptr<SequenceCache> home = t.Home(100, 1);
  CHECK_FALSE(t.policy->Admit(1, 100, 300, Promise::kFirm, home));
  REQUIRE(t.policy->Admit(1, 100, 300, Promise::kSoft, home));
  t.policy->WarmEvent(1).Wait();
  REQUIRE(t.policy->Warm(1));
  // Its reserved DRAM is kept.
  CHECK(Tiers::Reserved(*t.dram) == t.hbm->layout().BytesFor(300));
  CHECK_FALSE(t.policy->MakeFirm(1));
  // The sequence with the firm promise grows until pages are lacking; then the other one leaves.
  CHECK_FALSE(t.policy->Grow(0, most));
  for (int round = 0; round < 3; ++round) {
    t.policy->Evict(1, 100);
    t.policy->WarmEvent(1).Wait();
    REQUIRE(t.policy->Warm(1));
    home = t.policy->DetachHostCache(1);
    REQUIRE(home != nullptr);
    CHECK(Tiers::Used(*t.hbm) == 0);
    // It returns to another slot; its host cache is its reserved DRAM again, whatever else DRAM
    // holds.
    std::unique_ptr<SequenceCache> other = t.Home(t.dram->HeadroomNow().firm_tokens.least(), 9);
    REQUIRE(t.policy->Admit(1 + round, 100, 300, Promise::kSoft, home));
    t.policy->WarmEvent(1 + round).Wait();
    REQUIRE(t.policy->Warm(1 + round));
    t.CheckResident(1 + round, 100, 1);
    if (round == 2) break;
    t.policy->Evict(1 + round, 100);
    t.policy->WarmEvent(1 + round).Wait();
    home = t.policy->DetachHostCache(1 + round);
    REQUIRE(t.policy->Admit(1, 100, 300, Promise::kSoft, home));
    t.policy->WarmEvent(1).Wait();
    REQUIRE(t.policy->Warm(1));
  }
  t.policy->Release(0);
  CHECK(t.policy->MakeFirm(3));
  CHECK(Tiers::Reserved(*t.dram) == 0);
  t.policy->Release(3);
  CHECK(Tiers::Reserved(*t.hbm) == 0);
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
  CHECK(t.policy->DetachHostCache(0) == nullptr);
  CHECK(Tiers::Reserved(*t.dram) == 0);
  CHECK(Tiers::Reserved(*t.hbm) == 0);
}

}  // namespace
}  // namespace sluice
