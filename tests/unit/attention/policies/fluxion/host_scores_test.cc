// Lists by CPU workers, without a policy and without attention: random digests in pinned memory,
// random requests, and one call of each kernel for all rows to compare with.
#include "src/attention/policies/fluxion/host_scores.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/e4m3.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/worker_paths.h"

namespace sluice {
namespace {

using kernels::KernelTable;

constexpr int kLayers = 2, kSlots = 5, kRows = 6, kMaxContext = 9000;
constexpr int kHeadDim = 16, kRowsPerPage = 8;  // rows of level 0
constexpr int32_t kUnmade = -7;

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
    shape_.ring_units = 384 / 16;
    HostScores::Options options;
    options.device = &device;
    options.kernels = &table;
    options.workers = of.workers;
    options.shape = shape_;
    for (int layer = 0; layer < kLayers; ++layer) options.digests.push_back(MakeDigests());
    digests_ = options.digests;
    const int64_t words = Lists() + kRows * (2 + shape_.heads * (1 + kHeadDim));
    device_words_ = *device.Allocate(MemoryKind::kDevice, static_cast<size_t>(4 * words), "test");
    host_words_ = *device.Allocate(MemoryKind::kPinned, static_cast<size_t>(4 * words), "test");
    posted_ = *device.Allocate(MemoryKind::kPinned, static_cast<size_t>(4 * words), "test");
    made_words_ = *device.Allocate(
        MemoryKind::kPinned, static_cast<size_t>(4 * Lists() * (1 + shape_.most_units)), "test");
    options.levels = OnDevice(levels());
    options.blocks = OnDevice(blocks());
    auto made = HostScores::Create(options);
    REQUIRE(made.ok());
    scores_ = *std::move(made);
    part_words_.resize(static_cast<size_t>(Lists()));
    SlotWorkers::Options team;
    team.device = &device;
    team.channels = kLayers;
    team.workers = of.workers;
    team.slots = kSlots;
    team.groups = std::min(2, of.workers);
    team.deadline = absl::Seconds(60);
    auto workers = SlotWorkers::Create(
        team, [this](int worker, int channel) { return Share(worker, channel); });
    REQUIRE(workers.ok());
    workers_ = *std::move(workers);
    stream_ = device.NewStream(Device::StreamKind::kCompute);
    done_ = device.NewEvent();
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

  // A list of units, or none, if nobody has made it.
  using List = std::optional<std::vector<int32_t>>;

  // Has a round, and returns its lists.
  std::vector<List> Make(int layer) {
    std::fill(part_words_.begin(), part_words_.end(), PartWords{});
    std::fill_n(made_words_.as<int32_t>(), Lists(), kUnmade);
    stream_->Copy(device_words_.data(), host_words_.data(), host_words_.bytes());
    kernels::CopyRowsParams post{};
    const auto bytes = static_cast<int32_t>(device_words_.bytes());
    post.pieces[post.count++] = {device_words_.data(), posted_.data(), 0, bytes, nullptr, 1, bytes};
    scores_->Post(kRows, &post);
    device_.kernels().CopyRows(*stream_, post);
    workers_->Raise(*stream_, layer);
    workers_->Await(*stream_, layer);
    stream_->Record(*done_);
    done_->Wait();
    REQUIRE(device_.Health().ok());
    std::vector<List> out;
    for (int64_t list = 0; list < Lists(); ++list) {
      const int32_t count = Made().counts[list];
      const int32_t* const units = Made().units + list * shape_.most_units;
      out.push_back(count == kUnmade ? List() : std::vector<int32_t>(units, units + count));
    }
    return out;
  }

  // Returns the lists that one call of each kernel for all rows gives, of units that have left the
  // ring.
  std::vector<List> Expected(int layer) {
    std::vector<float> scores(
        static_cast<size_t>(int64_t{kRows} * shape_.heads * shape_.score_stride()));
    kernels::LevelScoresParams p{};
    p.q = q();
    p.q_stride = int64_t{shape_.heads} * kHeadDim;
    p.slots = slots();
    p.positions = positions();
    p.digests = digests_[static_cast<size_t>(layer)];
    p.levels = levels();
    p.blocks = blocks();
    p.scores = scores.data();
    p.score_stride = shape_.score_stride();
    p.rows = kRows;
    p.heads = shape_.heads;
    p.head_dim = kHeadDim;
    table_.level_scores(p, {0, 1});
    std::vector<int32_t> units(static_cast<size_t>(Lists() * shape_.most_units)),
        counts(static_cast<size_t>(Lists()));
    kernels::SelectUnionParams select{};
    select.scores = scores.data();
    select.score_stride = shape_.score_stride();
    select.slots = slots();
    select.positions = positions();
    select.levels = levels();
    select.blocks = blocks();
    select.selected = {units.data(), counts.data(), shape_.most_units};
    select.rows = kRows;
    select.heads = shape_.heads;
    select.kv_heads = of_.kv_heads;
    select.unit_tokens = shape_.unit_tokens;
    table_.select_union(select, {0, 1});
    std::vector<List> out;
    for (int64_t list = 0; list < Lists(); ++list) {
      const int64_t row = list / of_.kv_heads;
      List& of = out.emplace_back();
      if (slots()[row] < 0) continue;
      of.emplace();
      const int32_t newest = positions()[row] / shape_.unit_tokens;
      for (int32_t i = 0; i < counts[static_cast<size_t>(list)]; ++i) {
        const int32_t unit = units[static_cast<size_t>(list * shape_.most_units + i)];
        if (newest - unit >= shape_.ring_units) of->push_back(unit);
      }
      selected_ += counts[static_cast<size_t>(list)] * shape_.unit_tokens;
      missing_ += std::ssize(*of) * shape_.unit_tokens;
      if (list % of_.kv_heads == 0) ++steps_;
    }
    return out;
  }

  // Checks the lists of healthy sequences.
  void Check(const std::vector<List>& got, const std::vector<List>& want) const {
    for (size_t list = 0; list < got.size(); ++list) {
      const size_t row = list / static_cast<size_t>(of_.kv_heads);
      const int slot = slots()[row];
      if (slot >= 0 && !workers_->Health(slot).ok()) continue;
      INFO("row " << row << ", slot " << slot << ", position " << positions()[row] << ", list "
                  << list);
      REQUIRE(got[list].has_value() == want[list].has_value());
      if (got[list].has_value()) REQUIRE(*got[list] == *want[list]);
    }
  }

  // Checks that what Expected has returned since the world was made was counted, in all layers.
  void CheckCounts() const {
    PolicyStatistics::Layer sums;
    for (int layer = 0; layer < kLayers; ++layer) scores_->Count(layer, &sums);
    CHECK(sums.steps == steps_);
    CHECK(sums.selected == selected_);
    CHECK(sums.missing == missing_);
    CHECK(missing_ > 0);
    CHECK(missing_ < selected_);
  }

  std::vector<int> Failed() const {
    std::vector<int> out;
    for (int slot = 0; slot < kSlots; ++slot) {
      if (!workers_->Health(slot).ok()) out.push_back(slot);
    }
    return out;
  }
  SlotWorkers& workers() { return *workers_; }
  int64_t lists_made() const { return lists_made_.load(); }
  // Returns the lists of the drawn rows.
  int64_t ListsDrawn() const {
    return of_.kv_heads * (kRows - std::count(slots(), slots() + kRows, -1));
  }
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
  int32_t* slots() const { return host_words_.as<int32_t>(); }
  int32_t* positions() const { return slots() + kRows; }
  int32_t* levels() const { return positions() + kRows; }
  int32_t* blocks() const { return levels() + Lists(); }
  float* q() const { return reinterpret_cast<float*>(blocks() + kRows * shape_.heads); }

  template <typename T>
  const T* OnDevice(const T* host) const {
    return reinterpret_cast<const T*>(
        device_words_.as<uint8_t>() +
        (reinterpret_cast<const uint8_t*>(host) - host_words_.as<uint8_t>()));
  }
  kernels::UnitLists Made() const {
    auto* const counts = made_words_.as<int32_t>();
    return {counts + Lists(), counts, shape_.most_units};
  }
  // Returns the round as it was posted, in the order of the words.
  ListMaker::Round RoundOf(int layer) {
    ListMaker::Round round;
    round.channel = layer;
    round.rows = kRows;
    round.slots = posted_.as<int32_t>();
    round.positions = round.slots + kRows;
    round.q = posted_.as<float>() + (q() - host_words_.as<float>());
    round.words = part_words_.data();
    round.lists = Made();
    return round;
  }

  // Does a worker's share of a round that has no attention.
  absl::StatusOr<bool> Share(int worker, int layer) {
    const ListMaker::Round round = RoundOf(layer);
    bool more = false;
    {
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return false;
      scores_->Take(worker, round, *workers_);
      more = scores_->Claim(worker, round).has_value();
    }
    while (more) {
      const absl::Status fault = SlotWorkers::InjectedFault();
      if (!fault.ok()) return fault;
      scores_->Compute(worker, layer);
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return true;
      const std::optional<int64_t> list = scores_->Give(worker, round);
      if (list.has_value()) ++lists_made_;
      more = scores_->Claim(worker, round).has_value();
    }
    return true;
  }

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
  Buffer device_words_, host_words_, posted_;  // a request: where it is made, drawn and posted
  Buffer made_words_;                          // counts of lists, and their units
  std::vector<PartWords> part_words_;
  int64_t steps_ = 0, selected_ = 0, missing_ = 0;
  std::atomic<int64_t> lists_made_{0};
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
      int64_t lists = 0;
      for (int round = 0; round < 12; ++round) {
        world.Draw();
        lists += world.ListsDrawn();
        const int layer = round % kLayers;
        world.Check(world.Make(layer), world.Expected(layer));
      }
      CHECK(world.Failed().empty());
      CHECK(world.lists_made() == lists);  // each once
      world.CheckCounts();
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "however workers divide the blocks, lists are those of one call of each kernel", Same)

#ifndef SLUICE_NO_FAILPOINTS

// Returns the slots of the slot's group of workers, of two.
std::vector<int> GroupOf(int slot) {
  std::vector<int> out;
  for (int other = slot % 2; other < kSlots; other += 2) out.push_back(other);
  return out;
}

// The fault comes with the first task or with a later one, a list's selection among them: a list
// has 5 parts here, or fewer.
void Failing(Device& device, const KernelTable& table) {
  for (const std::string fault :
       {"attention.worker=error*1", "attention.worker_exit=error*1",
        "attention.worker_exit=error*1@7", "attention.worker=error*1@20"}) {
    World world(device, table, {}, TestSeed());
    const auto round = [&] {
      world.DrawWhole();
      world.Check(world.Make(1), world.Expected(1));
    };
    round();
    CHECK(world.Failed().empty());
    {
      const ScopedFailpoints armed(fault);
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
SLUICE_TEST_ON_EVERY_PATH(
    "a worker that fails or dies while lists are made ends its group's sequences", Failing)

#endif

}  // namespace
}  // namespace sluice
