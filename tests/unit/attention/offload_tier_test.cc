#include "src/attention/offload/offload_tier.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <set>

#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 4;
constexpr int kHeads = 2;
constexpr int kDim = 16;
constexpr int kBlock = 16;
constexpr int kSlots = 4;
constexpr int kMaxContext = 1024;
constexpr int kRowBytes = kDim * 2;
constexpr uint8_t kPoison = 0xEE;

CacheLayout Layout() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = kHeads;
  kv.block_tokens = kBlock;
  kv.parts = 2;
  kv.bytes_per_token = 2 * kRowBytes;
  return {kLayers, {kv}};
}

struct Shape {
  int dense_layers = 1;
  int ring_blocks = 2;
  int recall_blocks = 3;
  int unit_tokens = kBlock;
};

struct Tiers {
  explicit Tiers(const Shape& shape, size_t hbm_bytes = 1 << 20) {
    device = *NewCpuDevice({"portable", 1});
    hbm = *PagePool::Create("hbm", Layout(),
                            *device->Allocate(MemoryKind::kDevice, hbm_bytes, "hbm"));
    dram = *PagePool::Create("dram", Layout(),
                             *device->Allocate(MemoryKind::kPinned, 1 << 20, "dram"));
    std::memset(hbm->base(0), kPoison, hbm_bytes - 4096);
    options.device = device.get();
    options.hbm = hbm.get();
    options.dram = dram.get();
    options.slots = kSlots;
    options.max_context = kMaxContext;
    options.dense_layers = shape.dense_layers;
    options.ring_blocks = shape.ring_blocks;
    options.recall_blocks = shape.recall_blocks;
    options.unit_tokens = shape.unit_tokens;
    options.arrays = {{"digests", kBlock, 2 * kDim, kernels::DType::kBFloat16},
                      {"average", 0, 1, kernels::DType::kFloat32}};
  }
  void Create() { tier = *OffloadTier::Create(options); }

  // A home of `context` tokens, with room for `total`, whose bytes say where they belong.
  std::unique_ptr<SequenceCache> Home(int64_t context, int64_t total, uint8_t mark) {
    auto home = std::make_unique<SequenceCache>(
        dram.get(), dram->TryReserve(tier->FootprintOf(context, total).dram_tokens));
    home->EnsureTokens(context);
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        for (int64_t token = 0; token < context; ++token) {
          uint8_t* block = home->BlockAddress(layer, 0, head, token / kBlock);
          for (int part = 0; part < 2; ++part) {
            std::memset(block + (part * kBlock + token % kBlock) * kRowBytes,
                        Byte(layer, head, token, part, mark), kRowBytes);
          }
        }
      }
    }
    return home;
  }
  static uint8_t Byte(int layer, int head, int64_t token, int part, uint8_t mark) {
    const auto byte = static_cast<uint8_t>(mark + layer * 61 + head * 29 + token * 7 + part * 13);
    return byte == kPoison ? 0 : byte;
  }

  static const uint8_t* Block(const kernels::PagedCache& cache, int slot, int64_t entry, int head) {
    const int32_t page = cache.block_table[slot * cache.table_stride + entry];
    SLUICE_CHECK(page >= 0);
    return static_cast<const uint8_t*>(cache.base) + page * cache.page_bytes +
           head * (cache.page_bytes / cache.kv_heads);
  }
  // Token `at` of `cache` is token `token` of the sequence.
  void CheckToken(const kernels::PagedCache& cache, int slot, int64_t at, int layer, int head,
                  int64_t token, uint8_t mark) {
    const uint8_t* block = Block(cache, slot, at / kBlock, head);
    for (int part = 0; part < 2; ++part) {
      const uint8_t* row = block + (part * kBlock + at % kBlock) * kRowBytes;
      const uint8_t byte = Byte(layer, head, token, part, mark);
      if (std::all_of(row, row + kRowBytes, [byte](uint8_t b) { return b == byte; })) continue;
      INFO("layer " << layer << ", head " << head << ", token " << token << ", part " << part);
      REQUIRE(int{*row} == int{byte});
    }
  }
  static int32_t* Row(const kernels::PagedRows& rows, int slot, int head, int64_t row) {
    const int32_t page = rows.page_table[slot * rows.table_stride + row / rows.rows_per_page];
    SLUICE_CHECK(page >= 0);
    return reinterpret_cast<int32_t*>(
        static_cast<uint8_t*>(rows.base) + page * rows.page_bytes + head * rows.head_bytes +
        row % rows.rows_per_page * rows.dim * kernels::SizeOf(rows.type));
  }

  // Older than the ring of the row at `tokens`.
  int32_t OldUnits(int64_t tokens) const {
    const int64_t ring = options.ring_blocks * (kBlock / options.unit_tokens);
    return static_cast<int32_t>(std::max<int64_t>(tokens / options.unit_tokens - ring + 1, 0));
  }
  // Random units for each sparse layer and head.
  std::vector<std::vector<int32_t>> Units(int64_t tokens, SplitMix64& random) {
    std::vector<std::vector<int32_t>> units;
    for (int i = 0; i < (kLayers - options.dense_layers) * kHeads; ++i) {
      std::vector<int32_t> list;
      for (int32_t unit = 0; unit < OldUnits(tokens); ++unit) {
        if (random.Below(2) == 0) list.push_back(unit);
      }
      units.push_back(list);
    }
    return units;
  }

  void CheckDense(int slot, int64_t tokens, uint8_t mark) {
    for (int layer = 0; layer < options.dense_layers; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        for (int64_t t = 0; t < tokens; ++t) {
          CheckToken(tier->Dense(layer), slot, t, layer, head, t, mark);
        }
      }
    }
  }
  // What is in HBM before the row at `tokens`.
  void CheckWorkingSet(int slot, int64_t tokens, int64_t total, uint8_t mark,
                       const std::vector<std::vector<int32_t>>& units) {
    CheckDense(slot, tokens, mark);
    const int64_t ring_units = options.ring_blocks * (kBlock / options.unit_tokens);
    const int64_t ring_tokens = options.ring_blocks * kBlock;
    auto list = units.begin();
    for (int layer = options.dense_layers; layer < kLayers; ++layer) {
      const kernels::ResidencyTable residency = tier->Residency(layer);
      REQUIRE(residency.ring == ring_units);
      for (int head = 0; head < kHeads; ++head, ++list) {
        INFO("slot " << slot << ", tokens " << tokens << " of " << total);
        for (int64_t t = OldUnits(tokens) * options.unit_tokens; t < tokens; ++t) {
          CheckToken(tier->Ring(layer), slot, t % ring_tokens, layer, head, t, mark);
        }
        const int32_t places = tier->PlacesOf(total);
        std::map<int32_t, int32_t> place_of;
        for (size_t i = 0; i < list->size() && ring_units + static_cast<int64_t>(i) < places; ++i) {
          place_of[(*list)[i]] = static_cast<int32_t>(ring_units + static_cast<int64_t>(i));
        }
        for (int32_t unit = 0; unit < (total + options.unit_tokens - 1) / options.unit_tokens;
             ++unit) {
          const auto it = place_of.find(unit);
          REQUIRE(*Row(residency.place_of, slot, head, unit) ==
                  (it == place_of.end() ? -1 : it->second));
        }
        std::map<int32_t, int32_t> unit_at;
        for (const auto& [unit, place] : place_of) {
          unit_at[place] = unit;
          for (int t = 0; t < options.unit_tokens; ++t) {
            CheckToken(tier->Places(layer), slot, int64_t{place} * options.unit_tokens + t, layer,
                       head, int64_t{unit} * options.unit_tokens + t, mark);
          }
        }
        for (int32_t place = residency.ring; place < residency.count; ++place) {
          const auto it = unit_at.find(place);
          const int32_t none = place < places ? -1 : kernels::kNoPlace;
          REQUIRE(*Row(residency.places, slot, head, place) ==
                  (it == unit_at.end() ? none : it->second));
        }
        int64_t not_zero = 0;
        for (int64_t t = 0; t < int64_t{places} * options.unit_tokens; ++t) {
          not_zero += *Row(tier->Array(layer, 1), slot, head, t) != 0 ? 1 : 0;
        }
        REQUIRE(not_zero == 0);
      }
    }
  }
  void Wait(int slot) {
    while (!tier->Warm(slot)) tier->WarmEvent(slot).Wait();
  }

  OffloadTierOptions options;
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<OffloadTier> tier;
};

const Shape kShapes[] = {{1, 2, 3, kBlock}, {0, 1, 0, kBlock}, {2, 3, 5, 1},
                         {1, 1, 2, 1},      {4, 2, 2, kBlock}, {0, 100, 4, kBlock}};

// The pages of a slot by what they are for: no page is for two things.
std::multiset<int32_t> PagesOf(Tiers& t, int slot, int64_t total) {
  std::multiset<int32_t> pages;
  const auto add = [&](const int32_t* table, int64_t stride, int64_t count) {
    pages.insert(table + slot * stride, table + slot * stride + count);
  };
  const int64_t blocks = (total + kBlock - 1) / kBlock;
  for (int layer = 0; layer < kLayers; ++layer) {
    if (t.tier->dense(layer)) {
      const kernels::PagedCache dense = t.tier->Dense(layer);
      add(dense.block_table, dense.table_stride, blocks);
      continue;
    }
    const kernels::PagedCache places = t.tier->Places(layer);
    add(places.block_table, places.table_stride,
        t.tier->PlacesOf(total) / (kBlock / t.options.unit_tokens));
    const auto rows = [&](const kernels::PagedRows& r, int64_t count) {
      add(r.page_table, r.table_stride, (count + r.rows_per_page - 1) / r.rows_per_page);
    };
    const kernels::ResidencyTable residency = t.tier->Residency(layer);
    rows(residency.place_of, (total + t.options.unit_tokens - 1) / t.options.unit_tokens);
    rows(residency.places, residency.count);
  }
  return pages;
}

TEST_CASE(
    "a warmed sequence has its ring, its units and its dense layers, and tables that say so") {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape);
    t.Create();
    // Partial last blocks, whole ones, shorter than the ring, and one token.
    for (const int64_t tokens : {1, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100, 128, 199}) {
      const int64_t total = tokens + static_cast<int64_t>(1 + random.Below(60));
      const auto mark = static_cast<uint8_t>(random.Below(200));
      std::unique_ptr<SequenceCache> home = t.Home(tokens, total, mark);
      REQUIRE(t.tier->Admit(1, tokens, total, home));
      CHECK(home == nullptr);
      const auto units = t.Units(tokens, random);
      OffloadTier::BulkRow built{};
      t.tier->WarmUp(1, tokens, units,
                     [&](Stream&, const OffloadTier::BulkRow& row) { built = row; });
      t.Wait(1);
      CHECK(*built.slots == 1);
      CHECK(*built.first_positions == 0);
      CHECK(*built.positions == tokens - 1);
      t.CheckWorkingSet(1, tokens, total, mark, units);
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int64_t token = 0; token < tokens; ++token) {
          t.CheckToken(t.tier->Home(layer), 1, token, layer, 1, token, mark);
        }
      }
      t.tier->Release(1);
      CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
      CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
    }
  }
}

TEST_CASE(
    "what a footprint says is what a sequence takes, and each of its pages is for one thing") {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape);
    t.Create();
    const int64_t page = Layout().kinds[0].page_bytes();
    for (int round = 0; round < 20; ++round) {
      const auto total = static_cast<int64_t>(1 + random.Below(300));
      const Footprint footprint = t.tier->FootprintOf(0, total);
      CHECK(footprint.dram_tokens == total);
      std::unique_ptr<SequenceCache> none;
      REQUIRE(t.tier->Admit(0, 0, total, none));
      CHECK(t.hbm->UsageOf(0).used_bytes == Layout().BytesFor(footprint.hbm_tokens));
      CHECK(t.dram->UsageOf(0).used_bytes == Layout().BytesFor(total));
      t.Wait(0);
      // The two groups of arrays share pages: counted once each here.
      const std::multiset<int32_t> pages = PagesOf(t, 0, total);
      CHECK(std::set<int32_t>(pages.begin(), pages.end()).size() == pages.size());
      // At most a page less than a layer's worth is for nothing.
      CHECK(static_cast<int64_t>(pages.size()) * page <= t.hbm->UsageOf(0).used_bytes);
      CHECK(static_cast<int64_t>(pages.size()) + kLayers > t.hbm->UsageOf(0).used_bytes / page);
      t.tier->Release(0);
    }
  }
}

TEST_CASE("the longest sequence is the longest that either tier holds") {
  Tiers t({1, 2, 3, kBlock}, 96 << 10);
  t.options.max_context = 100000;
  t.Create();
  const int64_t most = t.tier->max_tokens();
  CHECK(most > 0);
  CHECK(t.hbm->CouldEverFit(t.tier->FootprintOf(0, most).hbm_tokens));
  CHECK_FALSE(t.hbm->CouldEverFit(t.tier->FootprintOf(0, most + 1).hbm_tokens));
  std::unique_ptr<SequenceCache> none;
  CHECK(t.tier->Admit(0, 0, most, none));
  t.Wait(0);
  t.tier->Release(0);
  t.options.hbm = t.dram.get();  // the larger one
  t.tier = *OffloadTier::Create(t.options);
  CHECK(t.tier->max_tokens() <= t.dram->capacity_tokens());
}

TEST_CASE("a home has room behind its sequence for what a policy copies") {
  Tiers t({0, 2, 0, kBlock});
  t.options.extra_home_tokens = [](int64_t total) { return total / 2; };
  t.Create();
  CHECK(t.tier->FootprintOf(0, 100).dram_tokens == 7 * kBlock + 50);
  std::unique_ptr<SequenceCache> home = t.Home(90, 100, 3);
  REQUIRE(t.tier->Admit(0, 90, 100, home));
  CHECK(t.tier->HomeOf(0).Pages(0, 0).size() == 7 + 4);
  t.Wait(0);
  t.tier->Release(0);
}

TEST_CASE(
    "the offload tiers admit what fits in both, and a home that does not stays with its caller") {
  Tiers t({1, 2, 3, kBlock}, 64 << 10);
  t.Create();
  const int64_t most = t.tier->max_tokens();
  std::unique_ptr<SequenceCache> none;
  REQUIRE(t.tier->Admit(0, 0, most, none));
  std::unique_ptr<SequenceCache> home = t.Home(10, 20, 1);
  const int64_t dram = t.dram->UsageOf(0).reserved_bytes;
  const int64_t hbm = t.hbm->UsageOf(0).reserved_bytes;
  CHECK_FALSE(t.tier->Admit(1, 10, 20, home));
  CHECK(home != nullptr);
  CHECK(t.dram->UsageOf(0).reserved_bytes == dram);
  t.Wait(0);
  t.tier->Release(0);
  REQUIRE(t.tier->Admit(1, 10, 20, home));
  t.Wait(1);
  t.tier->Release(1);
  // No room in DRAM: no HBM is kept.
  std::unique_ptr<SequenceCache> all = t.Home(0, t.dram->capacity_tokens(), 1);
  CHECK_FALSE(t.tier->Admit(1, 0, 20, none));
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
  CHECK(hbm > 0);
}

TEST_CASE("whatever comes and goes, each sequence has its own bytes and its own pages") {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape);
    t.Create();
    struct Live {
      int64_t tokens = 0, total = 0;
      uint8_t mark = 0;
      std::vector<std::vector<int32_t>> units;
    } live[kSlots];
    for (int round = 0; round < 60; ++round) {
      const auto slot = static_cast<int>(random.Below(kSlots));
      Live& l = live[slot];
      if (l.tokens != 0) {
        t.Wait(slot);
        t.CheckWorkingSet(slot, l.tokens, l.total, l.mark, l.units);
        t.tier->Release(slot);
        l = {};
        continue;
      }
      l.tokens = static_cast<int64_t>(1 + random.Below(200));
      l.total = l.tokens + static_cast<int64_t>(random.Below(100));
      l.mark = static_cast<uint8_t>(random.Below(200));
      std::unique_ptr<SequenceCache> home = t.Home(l.tokens, l.total, l.mark);
      REQUIRE(t.tier->Admit(slot, l.tokens, l.total, home));
      l.units = t.Units(l.tokens, random);
      // At once: the page numbers are still on their way.
      t.tier->WarmUp(slot, l.tokens, l.units, [](Stream&, const OffloadTier::BulkRow&) {});
      std::set<int32_t> pages;
      size_t count = 0;
      for (int other = 0; other < kSlots; ++other) {
        if (live[other].tokens == 0) continue;
        t.Wait(other);
        const std::multiset<int32_t> of = PagesOf(t, other, live[other].total);
        pages.insert(of.begin(), of.end());
        count += of.size();
      }
      REQUIRE(pages.size() == count);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      if (live[slot].tokens == 0) continue;
      t.Wait(slot);
      t.CheckWorkingSet(slot, live[slot].tokens, live[slot].total, live[slot].mark,
                        live[slot].units);
      t.tier->Release(slot);
    }
    CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
    CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
  }
}

TEST_CASE("an option out of range is refused by its name") {
  const auto message = [](const Shape& shape, int dim = 2 * kDim) {
    Tiers t(shape);
    t.options.arrays[0].dim = dim;
    const absl::Status status = OffloadTier::Create(t.options).status();
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  CHECK(message({5, 2, 3, kBlock}) == "dense_layers: expected 0 to the model's 4, found 5");
  CHECK(message({1, 0, 3, kBlock}) == "ring_blocks: expected at least 1, found 0");
  CHECK(message({1, 1, -1, kBlock}) == "recall_blocks: expected 0 or more, found -1");
  CHECK(message({1, 1, 1, 3}) == "unit_tokens: expected 1 or a block's 16, found 3");
  CHECK(message({}, 4096).find("the rows of digests, residency") != std::string::npos);
}

}  // namespace
}  // namespace sluice
