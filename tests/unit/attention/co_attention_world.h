// A world for tests of co-attention: sequences with host caches, random requests to CPU workers,
// and checks of the results.
#pragma once

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/scalar.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/decode_attention.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "tests/unit/attention/copying_maker.h"

namespace sluice::co_attention {

struct Shape {
  int slots = 6;
  int layers = 4;
  int max_rows = 8;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int block_tokens = 16;
  int unit_tokens = 16;
  int max_blocks = 6;  // maximum blocks of a sequence
  int capacity = 5;
  int workers = 3;
  absl::Duration deadline = absl::Seconds(60);
  kernels::DType type = kernels::DType::kBFloat16;
  int64_t part_bytes = 256 << 10;
  int pullers = 0;           // of the device
  bool makes_lists = false;  // by CopyingMaker, in the rounds
};

// Memory of the device, and the host memory through which the test reads and writes it.
template <typename T>
class Mirrored {
 public:
  Mirrored(Device& device, size_t count)
      : device_(*device.Allocate(MemoryKind::kDevice, count * sizeof(T), "test")),
        host_(*device.Allocate(MemoryKind::kPinned, count * sizeof(T), "test")) {}
  T* device() const { return device_.template as<T>(); }
  T* data() const { return host_.template as<T>(); }
  T& operator[](size_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + host_.bytes() / sizeof(T); }
  void ToDevice(Stream& s) const { s.Copy(device_.data(), host_.data(), host_.bytes()); }
  void ToHost(Stream& s) const { s.Copy(host_.data(), device_.data(), host_.bytes()); }

 private:
  Buffer device_, host_;
};

// A request of one layer, as the device makes it.
struct Request {
  Mirrored<int32_t> units;   // [max_rows * kv_heads][capacity]
  Mirrored<int32_t> counts;  // [max_rows * kv_heads]
  Mirrored<float> q;         // [max_rows][stride]
};

class World {
 public:
  World(Device& device, const kernels::KernelTable& table, const Shape& of, uint64_t seed)
      : shape(of),
        slots(device, static_cast<size_t>(of.max_rows)),
        positions(device, static_cast<size_t>(of.max_rows)),
        device_(device),
        table_(table),
        random_(seed) {
    CoAttention::Options options;
    options.device = &device;
    options.kernels = &table_;
    options.workers = shape.workers;
    options.deadline = shape.deadline;
    options.slots = shape.slots;
    options.layers = shape.layers;
    options.max_rows = shape.max_rows;
    options.heads = shape.heads;
    options.kv_heads = shape.kv_heads;
    options.head_dim = shape.head_dim;
    options.capacity = shape.capacity;
    options.unit_tokens = shape.unit_tokens;
    options.part_bytes = shape.part_bytes;
    options.pullers = shape.pullers;
    if (shape.makes_lists) {
      maker = std::make_unique<CopyingMaker>(device, shape.workers, shape.max_rows, shape.kv_heads,
                                             shape.capacity);
      options.maker = maker.get();
    }
    auto made = CoAttention::Create(options);
    REQUIRE(made.ok());
    co_attention = *std::move(made);
    stream = device.NewStream(Device::StreamKind::kCompute);
    done_ = device.NewEvent();
    MakeHomes();
    const auto rows = static_cast<size_t>(shape.max_rows);
    const auto lists = rows * static_cast<size_t>(shape.kv_heads);
    const size_t values = 2 * rows * static_cast<size_t>(shape.heads);
    shares_ = *device.Allocate(MemoryKind::kDevice,
                               values * static_cast<size_t>(shape.head_dim + 1) * sizeof(float),
                               "answers of both sides");
    for (int layer = 0; layer < shape.layers; ++layer) {
      requests_.push_back({{device, lists * static_cast<size_t>(shape.capacity)},
                           {device, lists},
                           {device, rows * static_cast<size_t>(Stride())}});
      o.emplace_back(device, rows * static_cast<size_t>(shape.heads * shape.head_dim));
      lse.emplace_back(device, rows * static_cast<size_t>(shape.heads));
    }
    std::fill(slots.begin(), slots.end(), -1);
    std::fill(positions.begin(), positions.end(), 0);
  }

  ~World() { co_attention.reset(); }  // ends first, because its workers read the host caches

  // Draws rows of some of the sequences in any order, `rows` in all, the last ones padded, and new
  // lists and queries for every layer. REQUIRES: nothing is under way.
  void Draw(int rows) {
    std::vector<int32_t> order(static_cast<size_t>(shape.slots));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_.Below(i)]);
    const int used =
        static_cast<int>(random_.Below(static_cast<uint64_t>(std::min(rows, shape.slots)) + 1));
    for (int r = 0; r < rows; ++r) {
      slots[static_cast<size_t>(r)] = r < used ? order[static_cast<size_t>(r)] : -1;
      if (r < used) {
        positions[static_cast<size_t>(r)] =
            static_cast<int32_t>(random_.Below(static_cast<uint64_t>(LastPosition())));
      }
    }
    DrawLists(rows);
  }
  // Draws every sequence, in order, at position 40 + slot. REQUIRES: as many rows as slots.
  void DrawWhole(int rows) {
    for (int r = 0; r < rows; ++r) {
      slots[static_cast<size_t>(r)] = r;
      positions[static_cast<size_t>(r)] = 40 + r;
    }
    DrawLists(rows);
  }
  void DrawLists(int rows) {
    for (Request& r : requests_) {
      for (float& v : r.q) v = static_cast<float>(random_.Uniform() * 4 - 2);
      for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < shape.kv_heads; ++head) DrawList(r, row, head);
      }
    }
  }

  // Draws lists of which only that of a row and KV head has units, all that there are; with row -1
  // none has any. REQUIRES: the rows are drawn.
  void DrawOneList(int rows, int row, int kv_head) {
    DrawLists(rows);
    for (Request& r : requests_) {
      std::fill(r.counts.begin(), r.counts.end(), 0);
      if (row < 0) continue;
      const auto list = static_cast<size_t>(row * shape.kv_heads + kv_head);
      int32_t* const units = r.units.data() + list * static_cast<size_t>(shape.capacity);
      const int all = positions[static_cast<size_t>(row)] / shape.unit_tokens + 1;
      r.counts[list] = std::min(all, shape.capacity);
      std::iota(units, units + r.counts[list], 0);
    }
  }

  // Enqueues one step like a policy with a look-ahead, or without one where the device pulls or
  // workers make the lists.
  void Enqueue(Stream& s, int rows) {
    slots.ToDevice(s);
    positions.ToDevice(s);
    if (shape.pullers > 0) return EnqueuePulled(s, rows);
    const int ahead = shape.makes_lists ? 0 : 1;
    for (int layer = 0; layer < ahead; ++layer) Ask(s, layer, rows);
    for (int layer = 0; layer < shape.layers; ++layer) {
      if (layer + ahead < shape.layers) Ask(s, layer + ahead, rows);
      const auto l = static_cast<size_t>(layer);
      co_attention->Finish(s, layer, slots.device(), rows, o[l].device(), lse[l].device());
      o[l].ToHost(s);
      lse[l].ToHost(s);
    }
  }
  void Wait() {
    stream->Record(*done_);
    done_->Wait();
    INFO(std::string(device_.Health().message()));
    REQUIRE(device_.Health().ok());
  }
  void Step(int rows) {
    Enqueue(*stream, rows);
    Wait();
  }

  // Checks that every row of a healthy sequence is what float64 gives, to `tolerance`, and, unless
  // the device pulls, what one call of the kernel for each part of its lists gives, merged in
  // order, to the bit.
  void Check(int rows, double tolerance) const;

  // Puts another sequence into the slot's host cache. REQUIRES: nothing is under way, and the slot
  // is at rest.
  void MoveIn(int slot) {
    for (size_t layer = 0; layer < homes_.size(); ++layer) {
      for (int block = 0; block < shape.max_blocks; ++block) {
        const kernels::PagedCache& cache = homes_[layer];
        const int64_t page = cache.block_table[slot * cache.table_stride + block];
        const int64_t elements = cache.page_bytes / kernels::SizeOf(shape.type);
        DrawElements(memory_[layer], page * elements, elements);
      }
    }
    co_attention->workers().Join(slot);
  }

  // Returns whether a worker has something to do for the row.
  bool Attends(int row) const {
    const auto first = static_cast<size_t>(row * shape.kv_heads);
    return requests_[0].counts[first] > 0;
  }
  // Returns the units that are asked for in all layers, rows and KV heads.
  int64_t UnitsAsked(int rows) const {
    int64_t units = 0;
    for (const Request& r : requests_) {
      for (int row = 0; row < rows; ++row) {
        if (slots[static_cast<size_t>(row)] < 0) continue;
        for (int head = 0; head < shape.kv_heads; ++head) {
          units += r.counts[static_cast<size_t>(row * shape.kv_heads + head)];
        }
      }
    }
    return units;
  }
  // Returns the tokens of all parts that the device was given.
  int64_t PulledTokens() const {
    int64_t tokens = 0;
    for (int layer = 0; layer < shape.layers; ++layer) tokens += co_attention->PulledTokens(layer);
    return tokens;
  }
  // Returns the units of each part but the last of a list of `count` units.
  int UnitsOfPart(int count) const;
  // Returns the parts that have units, over all layers, rows and KV heads, and of the longest list.
  std::pair<int, int> PartsAsked(int rows) const;
  // Returns the last position of the longest sequence; Draw takes none as late.
  int LastPosition() const { return MaxTokens() - 1; }
  int MaxTokens() const { return shape.max_blocks * shape.block_tokens; }
  std::vector<int> Failed() const {
    std::vector<int> out;
    for (int slot = 0; slot < shape.slots; ++slot) {
      if (!co_attention->workers().Health(slot).ok()) out.push_back(slot);
    }
    return out;
  }

  const Shape shape;
  const Mirrored<int32_t> slots, positions;  // [max_rows]
  std::vector<Mirrored<float>> o, lse;       // by layer
  std::unique_ptr<CopyingMaker> maker;       // null: the device makes lists
  std::unique_ptr<CoAttention> co_attention;
  std::unique_ptr<Stream> stream;

 private:
  int Stride() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.head_dim)); }

  void MakeHomes() {
    const int pages = shape.slots * shape.max_blocks;
    kernels::PagedCache cache{};
    cache.block_tokens = shape.block_tokens;
    cache.kv_heads = shape.kv_heads;
    cache.head_dim = shape.head_dim;
    cache.type = shape.type;
    cache.page_bytes = int64_t{shape.kv_heads} * 2 * shape.block_tokens * shape.head_dim *
                       kernels::SizeOf(shape.type);
    cache.table_stride = shape.max_blocks;
    const auto entries = static_cast<size_t>(pages);
    table_of_pages_ =
        *device_.Allocate(MemoryKind::kPinned, entries * sizeof(int32_t), "a table of pages");
    auto* const table = table_of_pages_.as<int32_t>();
    std::iota(table, table + entries, 0);
    for (size_t i = entries; i > 1; --i) std::swap(table[i - 1], table[random_.Below(i)]);
    cache.block_table = table;
    for (int layer = 0; layer < shape.layers; ++layer) {
      Buffer memory = *device_.Allocate(MemoryKind::kPinned,
                                        static_cast<size_t>(pages * cache.page_bytes), "homes");
      const int64_t elements = pages * cache.page_bytes / kernels::SizeOf(shape.type);
      DrawElements(memory, 0, elements);
      cache.base = memory.data();
      memory_.push_back(std::move(memory));
      homes_.push_back(cache);
    }
  }

  void DrawElements(const Buffer& memory, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      const auto value = static_cast<float>(random_.Uniform() * 2 - 1);
      if (shape.type == kernels::DType::kFloat32) {
        memory.as<float>()[i] = value;
      } else {
        memory.as<uint16_t>()[i] = kernels::FloatToBf16(value);
      }
    }
  }

  void DrawList(Request& r, int row, int head) {
    const size_t list = static_cast<size_t>(row * shape.kv_heads + head);
    int32_t* const units = r.units.data() + list * static_cast<size_t>(shape.capacity);
    r.counts[list] = 0;
    if (random_.Below(4) == 0) return;
    const int last = positions[static_cast<size_t>(row)] / shape.unit_tokens;
    for (int unit = 0; unit <= last && r.counts[list] < shape.capacity; ++unit) {
      if (random_.Below(2) == 0) units[r.counts[list]++] = unit;
    }
  }

  KvAttention::Queries QueriesOf(int layer, int rows) const {
    KvAttention::Queries queries;
    queries.q = requests_[static_cast<size_t>(layer)].q.device();
    queries.stride = Stride();
    queries.slots = slots.device();
    queries.positions = positions.device();
    queries.rows = rows;
    queries.heads = shape.heads;
    queries.scale = Scale();
    return queries;
  }
  kernels::UnitLists ListsOf(int layer) const {
    const Request& r = requests_[static_cast<size_t>(layer)];
    return {r.units.device(), r.counts.device(), shape.capacity};
  }

  void Ask(Stream& s, int layer, int rows) {
    const Request& r = requests_[static_cast<size_t>(layer)];
    for (const auto* list : {&r.units, &r.counts}) list->ToDevice(s);
    r.q.ToDevice(s);
    if (maker != nullptr) maker->Copy(ListsOf(layer));
    co_attention->Start(s, layer, QueriesOf(layer, rows), ListsOf(layer),
                        homes_[static_cast<size_t>(layer)]);
  }

  // Merges the answers of both sides.
  void EnqueuePulled(Stream& s, int rows) {
    const int64_t values = int64_t{rows} * shape.heads;
    auto* const both_o = shares_.as<float>();
    float* const both_lse = both_o + int64_t{2} * shape.max_rows * shape.heads * shape.head_dim;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const auto l = static_cast<size_t>(layer);
      Ask(s, layer, rows);
      Stream& link = s.Branch(1);
      link.After(s);
      co_attention->Pull(link, layer,
                         SparseAttentionOf(QueriesOf(layer, rows), homes_[l], ListsOf(layer),
                                           nullptr, shape.unit_tokens, both_o, both_lse));
      co_attention->Finish(s, layer, slots.device(), rows, both_o + values * shape.head_dim,
                           both_lse + values);
      s.After(link);
      kernels::MergeParams merge = MergeOf(QueriesOf(layer, rows), shape.head_dim, 2, both_o,
                                           both_lse, o[l].device(), kernels::DType::kFloat32);
      merge.out_lse = lse[l].device();
      device_.kernels().Merge(s, merge);
      o[l].ToHost(s);
      lse[l].ToHost(s);
    }
  }

  double Element(int layer, int slot, int kv_head, int position, int part, int d) const;
  void CheckHead(int layer, int row, int head, double tolerance) const;
  void CheckBits(int layer, int row, int kv_head) const;
  void ComputePart(int layer, int row, int kv_head, const int32_t* units, int32_t count, float* out,
                   float* out_lse) const;

  Device& device_;
  const kernels::KernelTable table_;
  SplitMix64 random_;
  std::unique_ptr<Event> done_;
  std::vector<Buffer> memory_;
  Buffer table_of_pages_;  // int32 [slots][max_blocks], pinned
  Buffer shares_;  // float [2][rows][heads][head_dim], [2][max_rows][heads]: by the device and by
                   // workers
  std::vector<kernels::PagedCache> homes_;  // by layer
  std::vector<Request> requests_;           // by layer
};

}  // namespace sluice::co_attention
