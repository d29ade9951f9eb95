#include "src/prefill/important_blocks.h"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 2, kHeads = 6, kKvHeads = 2, kDim = 32, kBlockTokens = 16;
constexpr int kContext = 12 * kBlockTokens + 5, kCount = 5;
constexpr int kBlocks = 13, kRows = 3;

// Float32 caches of one sequence, with a block to a page, and the queries of a prompt's last rows.
struct Prompt {
  explicit Prompt(Device& device) {
    SplitMix64 random(TestSeed());
    const auto normal = [&] {
      return static_cast<float>(random.Uniform() + random.Uniform() + random.Uniform() - 1.5);
    };
    const auto fill = [&](Buffer& buffer, size_t floats) {
      auto allocated = device.Allocate(MemoryKind::kDevice, floats * sizeof(float), "test");
      REQUIRE(allocated.ok());
      buffer = *std::move(allocated);
      for (size_t i = 0; i < floats; ++i) buffer.as<float>()[i] = 2 * normal();
    };
    constexpr size_t kPage = size_t{kKvHeads} * 2 * kBlockTokens * kDim;
    for (Buffer& cache : caches) fill(cache, kBlocks * kPage);
    for (Buffer& queries : q) fill(queries, size_t{kRows} * kHeads * kDim);
  }

  kernels::PagedCache Cache(int layer) const {
    kernels::PagedCache cache;
    cache.base = caches[static_cast<size_t>(layer)].data();
    cache.block_table = table.data();
    cache.table_stride = kBlocks;
    cache.page_bytes = int64_t{kKvHeads} * 2 * kBlockTokens * kDim * sizeof(float);
    cache.block_tokens = kBlockTokens;
    cache.kv_heads = kKvHeads;
    cache.head_dim = kDim;
    cache.type = kernels::DType::kFloat32;
    return cache;
  }
  kernels::AttentionParams Params(int layer) const {
    kernels::AttentionParams params{};
    params.q = q[static_cast<size_t>(layer)].as<float>();
    params.q_stride = kHeads * kDim;
    params.slots = slots.data();
    params.positions = positions.data();
    params.rows = kRows;
    params.heads = kHeads;
    params.scale = 0.3f;
    return params;
  }
  // Returns the sum, over the group's heads, of the last row's weights in each block.
  std::vector<double> Mass(int layer, int kv_head) const {
    std::vector<double> mass(kBlocks, 0);
    for (int head = kv_head * kHeads / kKvHeads; head < (kv_head + 1) * kHeads / kKvHeads; ++head) {
      const float* query =
          q[static_cast<size_t>(layer)].as<float>() + (int64_t{kRows - 1} * kHeads + head) * kDim;
      std::vector<double> weights;
      double sum = 0;
      for (int token = 0; token < kContext; ++token) {
        const float* key =
            caches[static_cast<size_t>(layer)].as<float>() +
            ((int64_t{table[static_cast<size_t>(token / kBlockTokens)]} * kKvHeads + kv_head) * 2 *
                 kBlockTokens +
             token % kBlockTokens) *
                kDim;
        double score = 0;
        for (int d = 0; d < kDim; ++d) score += double{query[d]} * key[d];
        weights.push_back(std::exp(0.3 * score));
        sum += weights.back();
      }
      for (size_t t = 0; t < weights.size(); ++t) mass[t / kBlockTokens] += weights[t] / sum;
    }
    return mass;
  }

  std::vector<int32_t> table = {4, 0, 7, 12, 1, 9, 3, 2, 11, 10, 8, 6, 5};
  std::vector<int32_t> slots = {0, 0, 0};
  std::vector<int32_t> positions = {kContext - 3, kContext - 2, kContext - 1};
  std::array<Buffer, kLayers> caches, q;
};

TEST_CASE("the blocks with most of the last row's attention are found, by layer and KV head") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 2});
  CacheLayout layout;
  layout.layers = kLayers;
  CacheKind kind;
  kind.heads = kKvHeads;
  kind.block_tokens = kBlockTokens;
  kind.element_type = DType::kFloat32;
  kind.SetEqualParts(2, int64_t{2} * kDim * sizeof(float));
  layout.kinds = {kind};
  const Prompt prompt(*device);
  const auto made = ImportantBlocks::Create(device.get(), layout, kHeads, 1000);
  REQUIRE(made.ok());
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  // A count above the number of blocks finds all of them.
  for (const int count : {kCount, 20}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      (*made)->Find(*stream, layer, prompt.Params(layer), prompt.Cache(layer), count);
    }
    const bool want_queries = count == kCount;
    const SelectionHints hints = (*made)->Read(*stream, count, want_queries);
    REQUIRE(hints.queries.size() == (want_queries ? size_t{kLayers} * kHeads * kDim : 0));
    for (size_t i = 0; i < hints.queries.size(); ++i) {
      const size_t layer = i / (kHeads * kDim), of_row = i % (kHeads * kDim);
      CHECK(hints.queries[i] ==
            prompt.q[layer].as<float>()[size_t{kRows - 1} * kHeads * kDim + of_row]);
    }
    CHECK(hints.unit_tokens == kBlockTokens);
    REQUIRE(hints.entries.size() == kLayers * kKvHeads);
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        const auto& entry = hints.entries[static_cast<size_t>(layer * kKvHeads + head)];
        INFO("layer " << layer << " head " << head << " count " << count);
        CHECK(entry.layer == static_cast<uint32_t>(layer));
        CHECK(entry.kv_head == static_cast<uint32_t>(head));
        CHECK_FALSE(entry.position.has_value());
        const size_t want = static_cast<size_t>(std::min(count, kBlocks));
        REQUIRE(entry.units.size() == want);
        CHECK(std::is_sorted(entry.units.begin(), entry.units.end()));
        const std::vector<double> mass = prompt.Mass(layer, head);
        std::vector<double> sorted = mass;
        std::sort(sorted.rbegin(), sorted.rend());
        double found = 0, best = 0;
        for (const uint32_t block : entry.units) found += mass[block];
        for (size_t i = 0; i < want; ++i) best += sorted[i];
        CHECK(found == Approx(best).epsilon(1e-4));  // equal except for ties
      }
    }
  }
}

}  // namespace
}  // namespace sluice
