// Scores by CPU workers, without a policy: random digests in pinned memory, random requests, and
// one call of the kernel for all rows to compare with.
#include "src/attention/policies/fluxion/host_scores.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/e4m3.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/worker_paths.h"

namespace sluice {
namespace {

using kernels::KernelTable;

constexpr int kLayers = 2, kSlots = 5, kRows = 6, kMaxContext = 9000;
constexpr int kHeadDim = 16, kRowsPerPage = 8;  // rows of level 0
constexpr uint32_t kPoison = 0x7FC0FFEE;        // no score has these bits

struct Of {
  int kv_heads = 2;
  int group = 3;
  int workers = 3;
  int levels = kernels::kFluxionLevels;  // that have digests
};

class World {
 public:
  World(Device& device, const KernelTable& table, const Of& of, uint64_t seed)
      : of_(of), table_(table), device_(device), random_(seed) {
    shape_.layers = kLayers;
    shape_.slots = kSlots;
    shape_.rows = kRows;
    shape_.heads = of.kv_heads * of.group;
    shape_.kv_heads = of.kv_heads;
    shape_.head_dim = kHeadDim;
    shape_.unit_tokens = 16;
    shape_.digest_levels = of.levels;
    shape_.most_units = (kMaxContext + 15) / 16;
    HostScores::Options options;
    options.device = &device;
    options.kernels = &table;
    options.workers = of.workers;
    options.shape = shape_;
    for (int layer = 0; layer < kLayers; ++layer) options.digests.push_back(MakeDigests());
    digests_ = options.digests;
    auto made = HostScores::Create(options);
    REQUIRE(made.ok());
    scores_ = *std::move(made);
    SlotWorkers::Options team;
    team.device = &device;
    team.channels = 1 + kLayers;  // the first one is another's
    team.workers = of.workers;
    team.slots = kSlots;
    team.groups = std::min(2, of.workers);
    team.deadline = absl::Seconds(60);
    auto workers = SlotWorkers::Create(
        team, [this](int worker, int channel) { return scores_->Share(worker, channel - 1); });
    REQUIRE(workers.ok());
    workers_ = *std::move(workers);
    scores_->ServeWith(workers_.get(), 1);
    stream_ = device.NewStream(Device::StreamKind::kCompute);
    done_ = device.NewEvent();
    const int64_t words = Lists() + kRows * (2 + shape_.heads * (1 + kHeadDim));
    device_words_ = *device.Allocate(MemoryKind::kDevice, static_cast<size_t>(4 * words), "test");
    host_words_ = *device.Allocate(MemoryKind::kPinned, static_cast<size_t>(4 * words), "test");
    // The first round tells where the scores lie, so that later ones can be poisoned before.
    Draw();
    Score(0);
  }

  // Draws rows, of which some are padded, and what they select of a layer.
  void Draw() {
    std::vector<int32_t> order(kSlots);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_.Below(i)]);
    for (int row = 0; row < kRows; ++row) {
      const bool padded = row >= kSlots || random_.Below(5) == 0;
      slots()[row] = padded ? -1 : order[static_cast<size_t>(row)];
      // Rows without a cpu segment are among them.
      positions()[row] = static_cast<int32_t>(random_.Below(kMaxContext));
      for (int head = 0; head < of_.kv_heads; ++head) DrawList(row, head);
    }
    for (int i = 0; i < kRows * shape_.heads * kHeadDim; ++i) {
      q()[i] = static_cast<float>(random_.Uniform() * 4 - 2);
    }
  }

  // Enqueues a round and returns its scores, by row and head. Those that nobody wrote are poison.
  std::vector<float> Score(int layer) {
    if (pinned_ != nullptr) {
      std::fill_n(reinterpret_cast<uint32_t*>(pinned_), Values(), kPoison);
    }
    stream_->Copy(device_words_.data(), host_words_.data(), host_words_.bytes());
    HostScores::Queries queries;
    const auto on_device = [&](const void* host) {
      return device_words_.as<uint8_t>() +
             (static_cast<const uint8_t*>(host) - host_words_.as<uint8_t>());
    };
    queries.q = reinterpret_cast<const float*>(on_device(q()));
    queries.stride = int64_t{shape_.heads} * kHeadDim;
    queries.slots = reinterpret_cast<const int32_t*>(on_device(slots()));
    queries.positions = reinterpret_cast<const int32_t*>(on_device(positions()));
    queries.rows = kRows;
    queries.heads = shape_.heads;
    pinned_ = const_cast<float*>(scores_->Score(
        *stream_, layer, queries, reinterpret_cast<const int32_t*>(on_device(levels())),
        reinterpret_cast<const int32_t*>(on_device(blocks()))));
    stream_->Record(*done_);
    done_->Wait();
    REQUIRE(device_.Health().ok());
    return {pinned_, pinned_ + Values()};
  }

  // Returns what one call of the kernel for all rows gives.
  std::vector<float> Expected(int layer) {
    std::vector<float> out(static_cast<size_t>(Values()));
    std::fill_n(reinterpret_cast<uint32_t*>(out.data()), Values(), kPoison);
    kernels::LevelScoresParams p{};
    p.q = q();
    p.q_stride = int64_t{shape_.heads} * kHeadDim;
    p.slots = slots();
    p.positions = positions();
    p.digests = digests_[static_cast<size_t>(layer)];
    p.levels = levels();
    p.blocks = blocks();
    p.scores = out.data();
    p.score_stride = shape_.score_stride();
    p.rows = kRows;
    p.heads = shape_.heads;
    p.head_dim = kHeadDim;
    table_.level_scores(p, {0, 1});
    return out;
  }

  // Checks the rows of healthy sequences to the bit.
  void Check(const std::vector<float>& got, const std::vector<float>& want) const {
    const auto of_row = static_cast<size_t>(shape_.heads * shape_.score_stride());
    for (size_t row = 0; row < kRows; ++row) {
      const int slot = slots()[row];
      if (slot >= 0 && !workers_->Health(slot).ok()) continue;
      INFO("row " << row << ", slot " << slot << ", position " << positions()[row]);
      REQUIRE(std::memcmp(got.data() + row * of_row, want.data() + row * of_row,
                          of_row * sizeof(float)) == 0);
    }
  }

  std::vector<int> Failed() const {
    std::vector<int> out;
    for (int slot = 0; slot < kSlots; ++slot) {
      if (!workers_->Health(slot).ok()) out.push_back(slot);
    }
    return out;
  }
  SlotWorkers& workers() { return *workers_; }
  // Makes every slot a row with blocks to score.
  void DrawWhole() {
    Draw();
    for (int row = 0; row < kSlots; ++row) {
      slots()[row] = row;
      positions()[row] = kMaxContext - 1 - row;
      for (int head = 0; head < of_.kv_heads; ++head) levels()[row * of_.kv_heads + head] = 0;
      for (int head = 0; head < shape_.heads; ++head) blocks()[row * shape_.heads + head] = 3;
    }
  }

 private:
  int64_t Lists() const { return int64_t{kRows} * of_.kv_heads; }
  int64_t Values() const { return int64_t{kRows} * shape_.heads * shape_.score_stride(); }
  int32_t* slots() const { return host_words_.as<int32_t>(); }
  int32_t* positions() const { return slots() + kRows; }
  int32_t* levels() const { return positions() + kRows; }
  int32_t* blocks() const { return levels() + Lists(); }
  float* q() const { return reinterpret_cast<float*>(blocks() + kRows * shape_.heads); }

  void DrawList(int row, int kv_head) {
    const auto level = static_cast<int32_t>(random_.Below(kernels::kFluxionLevels));
    const kernels::FluxionSegments segments = kernels::SegmentsOf(positions()[row]);
    const int32_t all = kernels::CpuBlocks(segments, level);
    levels()[row * of_.kv_heads + kv_head] = all == 0 || random_.Below(4) == 0 ? -1 : level;
    for (int h = kv_head * of_.group; h < (kv_head + 1) * of_.group; ++h) {
      const uint64_t kind = random_.Below(4);
      const auto some = static_cast<int32_t>(random_.Below(static_cast<uint64_t>(all) + 1));
      blocks()[row * shape_.heads + h] = kind == 0 ? 0 : kind == 1 ? all : some;
    }
  }

  // Makes random digests of every slot, in pages in random order.
  kernels::LevelDigests MakeDigests() {
    const int pages_of_slot = shape_.most_units / kRowsPerPage + 1;
    const int pages = kSlots * pages_of_slot;
    auto& table = tables_.emplace_back(static_cast<size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random_.Below(i)]);
    kernels::LevelDigests out{};
    const int64_t row_bytes = shape_.digest_dim();
    const int64_t head_bytes = 2 * kRowsPerPage * row_bytes;  // 8 + 4 + 2 + 1 rows
    const int64_t page_bytes = of_.kv_heads * head_bytes;
    Buffer& memory = memory_.emplace_back(
        *device_.Allocate(MemoryKind::kPinned, static_cast<size_t>(pages * page_bytes), "digests"));
    int64_t offset = 0;
    for (int level = 0; level < of_.levels; ++level) {
      const int per_page = kRowsPerPage >> level;
      out.of[level] = {memory.as<uint8_t>() + offset,
                       table.data(),
                       pages_of_slot,
                       page_bytes,
                       head_bytes,
                       per_page,
                       shape_.digest_dim(),
                       kernels::DType::kFloat8E4M3,
                       of_.kv_heads};
      offset += per_page * row_bytes;
    }
    for (int64_t i = 0; i < pages * page_bytes; ++i) {
      const auto value = static_cast<float>(random_.Uniform());
      memory.as<uint8_t>()[i] = kernels::FloatToE4M3(value);
    }
    return out;
  }

  const Of of_;
  const KernelTable& table_;
  Device& device_;
  SplitMix64 random_;
  FluxionShape shape_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<Buffer> memory_;
  std::vector<kernels::LevelDigests> digests_;
  Buffer device_words_, host_words_;
  float* pinned_ = nullptr;
  std::unique_ptr<Event> done_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<HostScores> scores_;
  std::unique_ptr<SlotWorkers> workers_;  // last: its threads use the scores
};

void Same(Device& device, const KernelTable& table) {
  for (const int group : {1, 3, 4}) {
    for (const int workers : {1, 2, 5}) {
      const int levels = group == 3 ? 1 : kernels::kFluxionLevels;
      INFO("group of " << group << ", " << workers << " workers, " << levels << " levels");
      World world(device, table, {2, group, workers, levels}, TestSeed());
      for (int round = 0; round < 12; ++round) {
        world.Draw();
        const int layer = round % kLayers;
        world.Check(world.Score(layer), world.Expected(layer));
      }
      CHECK(world.Failed().empty());
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "however workers divide the blocks, each head has the scores of one call, and no others", Same)

#ifndef SLUICE_NO_FAILPOINTS

// Returns the slots of the slot's group of workers, of two.
std::vector<int> GroupOf(int slot) {
  std::vector<int> out;
  for (int other = slot % 2; other < kSlots; other += 2) out.push_back(other);
  return out;
}

void Failing(Device& device, const KernelTable& table) {
  for (const std::string fault : {"attention.worker", "attention.worker_exit"}) {
    World world(device, table, {}, TestSeed());
    const auto round = [&] {
      world.DrawWhole();
      world.Check(world.Score(1), world.Expected(1));
    };
    round();
    CHECK(world.Failed().empty());
    {
      const ScopedFailpoints armed(fault + "=error*1");
      round();
    }
    INFO(fault);
    const std::vector<int> lost = world.Failed();
    REQUIRE_FALSE(lost.empty());
    CHECK(lost == GroupOf(lost.front()));
    // Those that come after them have the workers that are left.
    for (const int slot : lost) world.workers().Join(slot);
    for (int i = 0; i < 10; ++i) round();
    CHECK(world.Failed().empty());
  }
}
SLUICE_TEST_ON_EVERY_PATH("a worker that fails or dies while it scores ends its group's sequences",
                          Failing)

#endif

}  // namespace
}  // namespace sluice
