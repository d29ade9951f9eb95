#include "src/attention/offload/offload_tier.h"

#include <catch2/catch.hpp>
#include <set>

#include "src/base/rng.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/offload_tiers.h"

namespace sluice::offload_tiers {
namespace {

const Shape kShapes[] = {
    {1, 2, 3, kBlock},
    {0, 1, 0, kBlock},
    {2, 3, 5, 1},
    {1, 1, 2, 1},
    {4, 2, 2, kBlock},
    {0, 100, 4, kBlock},
    {1, 1, 1, 1, 0.3},
    {0, 2, 1, kBlock, 0.5},
    // One head of layer 1, both of layer 2, and none of layer 3 are persistent.
    {1, 1, 2, 1, 0.2, {0, 1, 0, 1, 1, 1, 0, 0}},
    {0, 2, 1, kBlock, 0, {1, 0, 0, 1, 1, 1, 0, 0}}};

// Returns the pages that the heads of a layer share. No block is two heads'.
std::set<int32_t> PagesOfHeads(Tiers& t, int slot, int layer, int64_t total) {
  const kernels::PagedCache places = t.tier->Places(layer);
  const int64_t whole = t.options.ring_blocks + (total + kBlock - 1) / kBlock;
  std::set<int32_t> blocks, pages;
  for (int head = 0; head < kHeads; ++head) {
    const int64_t count = t.tier->persistent(layer, head)
                              ? whole
                              : t.tier->PlacesOf(total) / (kBlock / t.options.unit_tokens);
    const int32_t* const table =
        places.block_table + slot * places.table_stride + *t.At(places.head_tables + head);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t block = *t.At(table + i);
      REQUIRE(blocks.insert(block).second);
      pages.insert(block / kHeads);
    }
  }
  return pages;
}

// Returns the pages of a slot, by use: no page has two uses.
std::multiset<int32_t> PagesOf(Tiers& t, int slot, int64_t total) {
  std::multiset<int32_t> pages;
  const auto add = [&](const int32_t* table, int64_t stride, int64_t count) {
    const int32_t* const row = t.At(table + slot * stride);
    pages.insert(row, row + count);
  };
  const int64_t blocks = (total + kBlock - 1) / kBlock;
  for (int layer = 0; layer < kLayers; ++layer) {
    if (t.tier->dense(layer)) {
      const kernels::PagedCache dense = t.tier->Dense(layer);
      add(dense.block_table, dense.table_stride, blocks);
      continue;
    }
    const kernels::PagedCache places = t.tier->Places(layer);
    if (places.head_tables != nullptr) {
      const std::set<int32_t> of_heads = PagesOfHeads(t, slot, layer, total);
      pages.insert(of_heads.begin(), of_heads.end());
    } else {
      add(places.block_table, places.table_stride,
          t.tier->PlacesOf(total) / (kBlock / t.options.unit_tokens));
    }
    const auto rows = [&](const kernels::PagedRows& r, int64_t count) {
      add(r.page_table, r.table_stride, (count + r.rows_per_page - 1) / r.rows_per_page);
    };
    const kernels::ResidencyTable residency = t.tier->Residency(layer);
    rows(residency.place_of, (total + t.options.unit_tokens - 1) / t.options.unit_tokens);
    rows(residency.places, residency.count);
  }
  return pages;
}

// Runs a test on the CPU device and on a GPU.
void OnDevice(const std::string& kernels, void (*test)(const std::string& kernels)) {
  const absl::Status status = testing::TestDevice(kernels).status();
  if (absl::IsNotFound(status)) return SkipTest(std::string(status.message()));
  test(kernels);
}
#define SLUICE_TEST_ON_CPU_AND_GPU(claim, test)    \
  TEST_CASE(claim) { OnDevice("portable", test); } \
  TEST_CASE(claim " (cuda)", "[cuda]") { OnDevice("cuda", test); }

void Warmed(const std::string& kernels) {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape, 1 << 20, kernels);
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
      const Buffer row = *t.device->Allocate(MemoryKind::kPinned, 3 * sizeof(int32_t), "test");
      CHECK(built.first_positions == built.slots + 1);
      CHECK(built.positions == built.slots + 2);
      t.stream->Copy(row.data(), built.slots, row.bytes());
      t.Finish();
      CHECK(row.as<int32_t>()[0] == 1);
      CHECK(row.as<int32_t>()[1] == 0);
      CHECK(row.as<int32_t>()[2] == tokens - 1);
      t.CheckWorkingSet(1, tokens, total, mark, units);
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int64_t token = 0; token < tokens; ++token) {
          t.CheckToken(t.tier->Home(layer), 1, token, layer, 1, token, mark);
          t.CheckToken(t.tier->HostHome(layer), 1, token, layer, 1, token, mark);
        }
      }
      t.tier->Release(1);
      CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
      CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
    }
  }
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a warmed sequence has its ring, its units and its dense layers, and tables that say so",
    Warmed)

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
      // The two groups of arrays share pages, which are counted once each here.
      const std::multiset<int32_t> pages = PagesOf(t, 0, total);
      CHECK(std::set<int32_t>(pages.begin(), pages.end()).size() == pages.size());
      // At most a page less than a layer's worth is unused.
      CHECK(static_cast<int64_t>(pages.size()) * page <= t.hbm->UsageOf(0).used_bytes);
      CHECK(static_cast<int64_t>(pages.size()) + kLayers > t.hbm->UsageOf(0).used_bytes / page);
      t.tier->Release(0);
    }
  }
}

// Adds an array in DRAM beside those in HBM.
void AddHomeArray(Tiers& t) {
  t.options.arrays.push_back(
      {"levels", 2 * kBlock, 3 * kDim, kernels::DType::kBFloat16, OffloadArray::Place::kDram});
}

// Returns the pages of the home that hold the array in DRAM, by its rows, as workers see them.
std::set<int32_t> HomeArrayPages(Tiers& t, int slot, int64_t total) {
  std::set<int32_t> pages;
  for (int layer = t.options.dense_layers; layer < kLayers; ++layer) {
    const kernels::PagedRows host = t.tier->HostArray(layer, 2);
    const kernels::PagedRows device = t.tier->Array(layer, 2);
    CHECK(host.base >= t.dram->base(0));
    CHECK(host.base == device.base);
    const int64_t rows = (total + 2 * kBlock - 1) / (2 * kBlock);
    for (int64_t i = 0; i < (rows + host.rows_per_page - 1) / host.rows_per_page; ++i) {
      const int32_t page = host.page_table[slot * host.table_stride + i];
      CHECK(page == *t.At(device.page_table + slot * device.table_stride + i));
      CHECK(pages.insert(page).second);
    }
    CHECK(t.tier->ArrayRow(slot, layer, 2, 1, 0) ==
          reinterpret_cast<const uint8_t*>(t.Row(device, slot, 1, 0)));
  }
  return pages;
}

TEST_CASE("arrays in DRAM are pages of the home that no token has, and are counted in it") {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape);
    AddHomeArray(t);
    t.Create();
    for (int round = 0; round < 20; ++round) {
      const auto tokens = static_cast<int64_t>(1 + random.Below(200));
      const auto total = tokens + static_cast<int64_t>(1 + random.Below(100));
      const Footprint footprint = t.tier->FootprintOf(tokens, total);
      CHECK((footprint.dram_tokens.least() > total) == (shape.dense_layers < kLayers));
      std::unique_ptr<SequenceCache> home = t.Home(tokens, total, 7);
      REQUIRE(t.tier->Admit(2, tokens, total, home));
      const auto units = t.Units(tokens, random);
      t.tier->WarmUp(2, tokens, units, [](Stream&, const OffloadTier::BulkRow&) {});
      t.Wait(2);
      t.CheckWorkingSet(2, tokens, total, 7, units);
      CHECK(t.dram->UsageOf(0).used_bytes == Layout().BytesFor(footprint.dram_tokens));
      std::set<int32_t> pages = HomeArrayPages(t, 2, total);
      const size_t of_array = pages.size();
      const int64_t blocks = (total + kBlock - 1) / kBlock;
      for (int layer = 0; layer < kLayers; ++layer) {
        const std::vector<int32_t>& of_layer = t.tier->HomeOf(2).Pages(layer, 0);
        pages.insert(of_layer.begin(), of_layer.begin() + blocks);
      }
      CHECK(pages.size() == of_array + static_cast<size_t>(kLayers * blocks));
      // A kept home goes on without the array, and gets room for it anew with a longer sequence.
      home = t.tier->DetachHostCache(2);
      t.tier->Release(2);
      CHECK(t.dram->UsageOf(0).used_bytes == Layout().BytesFor(total));
      const int64_t longer = total + static_cast<int64_t>(random.Below(100));
      REQUIRE(t.tier->Admit(3, tokens, longer, home));
      t.Wait(3);
      CHECK(t.dram->UsageOf(0).reserved_bytes ==
            Layout().BytesFor(t.tier->FootprintOf(tokens, longer).dram_tokens));
      HomeArrayPages(t, 3, longer);
      for (int64_t token = 0; token < tokens; ++token) {
        t.CheckToken(t.tier->HostHome(1), 3, token, 1, 1, token, 7);
      }
      t.tier->Release(3);
      CHECK(t.dram->UsageOf(0).reserved_bytes == 0);
    }
  }
}

TEST_CASE("the longest sequence has room for its arrays in DRAM too") {
  Tiers t({1, 2, 3, kBlock}, 1 << 20);
  AddHomeArray(t);
  t.options.max_context = 100000;
  t.Create();
  const int64_t most = t.tier->max_tokens();
  CHECK(most < t.dram->capacity_tokens());
  CHECK(t.dram->CouldEverFit(t.tier->FootprintOf(0, most).dram_tokens));
  CHECK_FALSE(t.dram->CouldEverFit(t.tier->FootprintOf(0, most + 1).dram_tokens));
  std::unique_ptr<SequenceCache> none;
  CHECK(t.tier->Admit(0, 0, most, none));
  t.Wait(0);
  t.tier->Release(0);
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
  // Without capacity in DRAM no HBM is kept either.
  std::unique_ptr<SequenceCache> all = t.Home(0, t.dram->capacity_tokens(), 1);
  CHECK_FALSE(t.tier->Admit(1, 0, 20, none));
  CHECK(t.hbm->UsageOf(0).reserved_bytes == 0);
  CHECK(hbm > 0);
}

void Traffic(const std::string& kernels) {
  SplitMix64 random(TestSeed());
  for (const Shape& shape : kShapes) {
    Tiers t(shape, 1 << 20, kernels);
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
      // Started at once, while the page numbers are still on their way.
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
SLUICE_TEST_ON_CPU_AND_GPU(
    "whatever comes and goes, each sequence has its own bytes and its own pages", Traffic)

TEST_CASE("a long sequence has places for a share of its tokens") {
  Tiers t({1, 2, 3, kBlock, 0.25});
  t.Create();
  // Blocks: 2 of the ring, and 3, or those of a quarter of the tokens; never more than there are.
  CHECK(t.tier->PlacesOf(kBlock) == 1);
  CHECK(t.tier->PlacesOf(6 * kBlock) == 5);
  CHECK(t.tier->PlacesOf(12 * kBlock) == 5);
  CHECK(t.tier->PlacesOf(12 * kBlock + 1) == 6);
  CHECK(t.tier->FootprintOf(8, 12 * kBlock + 1).hbm_tokens.most() >=
        t.tier->FootprintOf(8, 12 * kBlock).hbm_tokens.most());
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
  CHECK(message({1, 1, 1, kBlock, -2}) == "recall_share: expected 0 to 1, found -2");
  CHECK(message({1, 1, 1, kBlock, 1.5}) == "recall_share: expected 0 to 1, found 1.5");
  CHECK(message({1, 1, 1, kBlock, 0, {1, 1}}) == "persistent: expected none or 8 heads, found 2");
  CHECK(message({1, 1, 1, 3}) == "unit_tokens: expected 1 or a block's 16, found 3");
  CHECK(message({}, 4096).find("the rows of digests, residency") != std::string::npos);
}

}  // namespace
}  // namespace sluice::offload_tiers
