// Offload tiers of small sequences whose bytes encode where they belong, on any device.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/attention/offload/offload_tier.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "tests/support/device.h"

namespace sluice::offload_tiers {

inline constexpr int kLayers = 4;
inline constexpr int kHeads = 2;
inline constexpr int kDim = 16;
inline constexpr int kBlock = 16;
inline constexpr int kSlots = 4;
inline constexpr int kMaxContext = 1024;
inline constexpr int kRowBytes = kDim * 2;
inline constexpr uint8_t kPoison = 0xEE;

inline CacheLayout Layout() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = kHeads;
  kv.block_tokens = kBlock;
  kv.SetEqualParts(2, 2 * kRowBytes);
  return {kLayers, {kv}};
}

struct Shape {
  int dense_layers = 1;
  int ring_blocks = 2;
  int recall_blocks = 3;
  int unit_tokens = kBlock;
  double recall_share = 0;
  std::vector<uint8_t> persistent = {};
};

struct Tiers {
  explicit Tiers(const Shape& shape, size_t hbm_bytes = 1 << 20,
                 const std::string& kernels = "portable") {
    device = *testing::TestDevice(kernels, /*threads=*/1);
    stream = device->NewStream(Device::StreamKind::kCopy);
    done = device->NewEvent();
    hbm = *PagePool::Create("hbm", Layout(),
                            *device->Allocate(MemoryKind::kDevice, hbm_bytes, "hbm"));
    dram = *PagePool::Create("dram", Layout(),
                             *device->Allocate(MemoryKind::kPinned, 1 << 20, "dram"));
    arena = {hbm->base(0), *device->Allocate(MemoryKind::kPinned, hbm_bytes - 4096, "test")};
    stream->Fill(hbm->base(0), kPoison, arena.host.bytes());
    Finish();
    options.device = device.get();
    options.hbm = hbm.get();
    options.dram = dram.get();
    options.slots = kSlots;
    options.max_context = kMaxContext;
    options.dense_layers = shape.dense_layers;
    options.ring_blocks = shape.ring_blocks;
    options.recall_blocks = shape.recall_blocks;
    options.unit_tokens = shape.unit_tokens;
    options.recall_share = shape.recall_share;
    options.persistent = shape.persistent;
    options.arrays = {{"digests", kBlock, 2 * kDim, kernels::DType::kBFloat16},
                      {"average", 0, 1, kernels::DType::kFloat32}};
  }
  void Create() {
    tier = *OffloadTier::Create(options);
    // A slot's tables are one row, which begins with the first layer's entries.
    const kernels::PagedCache first = tier->dense(0) ? tier->Dense(0) : tier->Places(0);
    const auto bytes = static_cast<size_t>(kSlots * first.table_stride) * sizeof(int32_t);
    tables = {first.block_table, *device->Allocate(MemoryKind::kPinned, bytes, "test")};
    const kernels::PagedCache home = tier->Home(0);
    const auto home_bytes = static_cast<size_t>(kSlots * home.table_stride) * sizeof(int32_t);
    homes = {home.block_table, *device->Allocate(MemoryKind::kPinned, home_bytes, "test")};
    for (int layer = options.dense_layers; layer < kLayers; ++layer) {
      const kernels::PagedCache places = tier->Places(layer);
      if (places.head_tables == nullptr) continue;
      constexpr size_t kBytes = sizeof(int32_t) * kLayers * kHeads;
      head_tables = {places.head_tables - layer * kHeads,
                     *device->Allocate(MemoryKind::kPinned, kBytes, "test")};
      persistent = {tier->Residency(layer).persistent - layer * kHeads,
                    *device->Allocate(MemoryKind::kPinned, kBytes, "test")};
    }
  }
  void Finish() {
    stream->Record(*done);
    done->Wait();
  }
  // Copies the device's memory to the host.
  void ReadBack() {
    for (const Seen* seen : All()) {
      if (seen->host.bytes() == 0) continue;
      stream->Copy(seen->host.data(), seen->device, seen->host.bytes());
    }
    Finish();
  }
  // Returns where the host sees an address of the device, as it was at the last ReadBack. The host
  // sees its own memory (host caches) directly.
  template <typename T>
  const T* At(const T* address) const {
    const auto* const at = reinterpret_cast<const uint8_t*>(address);
    for (const Seen* seen : All()) {
      const auto* const begin = static_cast<const uint8_t*>(seen->device);
      if (at >= begin && at < begin + seen->host.bytes()) {
        return reinterpret_cast<const T*>(seen->host.as<uint8_t>() + (at - begin));
      }
    }
    return address;
  }

  // Makes a host cache of `context` tokens, reserved for `total`, whose bytes encode where they
  // belong.
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

  const uint8_t* Block(const kernels::PagedCache& cache, int slot, int64_t entry, int head) const {
    const int32_t* const table = cache.block_table + slot * cache.table_stride;
    if (cache.head_tables != nullptr) {
      const int32_t block = *At(table + *At(cache.head_tables + head) + entry);
      SLUICE_CHECK(block >= 0);
      return At(static_cast<const uint8_t*>(cache.base) +
                block * (cache.page_bytes / cache.kv_heads));
    }
    const int32_t page = *At(table + entry);
    SLUICE_CHECK(page >= 0);
    return At(static_cast<const uint8_t*>(cache.base) + page * cache.page_bytes +
              head * (cache.page_bytes / cache.kv_heads));
  }
  // Checks that token `at` of `cache` is token `token` of the sequence.
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
  const int32_t* Row(const kernels::PagedRows& rows, int slot, int head, int64_t row) const {
    const int32_t page = *At(rows.page_table + slot * rows.table_stride + row / rows.rows_per_page);
    SLUICE_CHECK(page >= 0);
    return reinterpret_cast<const int32_t*>(At(
        static_cast<const uint8_t*>(rows.base) + page * rows.page_bytes + head * rows.head_bytes +
        row % rows.rows_per_page * rows.dim * kernels::SizeOf(rows.type)));
  }

  // Returns the number of units that are older than the ring of the row at `tokens`.
  int32_t OldUnits(int64_t tokens) const {
    const int64_t ring = options.ring_blocks * (kBlock / options.unit_tokens);
    return static_cast<int32_t>(std::max<int64_t>(tokens / options.unit_tokens - ring + 1, 0));
  }
  // Draws random units for each sparse layer and head.
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
  // Checks what is in HBM before the row at `tokens`.
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
        const bool persists = tier->persistent(layer, head);
        if (residency.persistent != nullptr) {
          REQUIRE(*At(residency.persistent + head) == (persists ? 1 : 0));
        }
        if (persists) {
          for (int64_t t = 0; t < OldUnits(tokens) * options.unit_tokens; ++t) {
            CheckToken(tier->Places(layer), slot, ring_tokens + t, layer, head, t, mark);
          }
          continue;
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
    ReadBack();
  }

  // Memory of the device that the test reads.
  struct Seen {
    const void* device = nullptr;
    Buffer host;  // copy of its bytes
  };

  std::vector<const Seen*> All() const {
    return {&arena, &tables, &homes, &head_tables, &persistent};
  }

  OffloadTierOptions options;
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> hbm, dram;
  Seen arena, tables, homes, head_tables, persistent;
  std::unique_ptr<Event> done;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<OffloadTier> tier;
};

}  // namespace sluice::offload_tiers
