// A world for tests of movers: random lists of tokens of several layers, and a naive copy to check
// what came to HBM.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "src/attention/offload/row_mover.h"
#include "src/base/rng.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::row_mover {

struct Shape {
  int slots = 6;
  int layers = 4;
  int max_rows = 8;
  int kv_heads = 2;  // lists of a row
  int parts = 2;     // of a unit: K and V of a token; 1: a latent entry
  int head_dim = 16;
  int block_tokens = 8;
  int blocks = 40;  // of a sequence in a layer
  int capacity = 150;
  PolicyOptions::Mover kind = PolicyOptions::Mover::kCpu;
  int workers = 3;
  absl::Duration deadline = absl::Seconds(60);
  int64_t ring_bytes = int64_t{4} << 20;
};

class World {
 public:
  World(Device& device, const Shape& of, uint64_t seed)
      : shape(of),
        device_(device),
        random_(seed),
        slots_(device, Count(of.max_rows)),
        home_(*device.Allocate(MemoryKind::kPinned, ArenaBytes(), "host cache")),
        resident_(device, ArenaBytes()) {
    for (int layer = 0; layer < shape.layers; ++layer) lists_.emplace_back(device, of);
    for (int slot = 0; slot < shape.slots; ++slot) FillHome(slot);
    absl::StatusOr<std::unique_ptr<RowMover>> made = RowMover::Create(MoverOptions());
    INFO(std::string(made.status().ToString()));
    REQUIRE(made.ok());
    mover = *std::move(made);
    stream = device.NewStream(Device::StreamKind::kCompute);
    done_ = device.NewEvent();
  }

  RowMover::Options MoverOptions() const {
    RowMover::Options options;
    options.kind = shape.kind;
    options.device = &device_;
    options.slots = shape.slots;
    options.max_rows = shape.max_rows;
    options.lists_per_row = shape.kv_heads;
    options.capacity = shape.capacity;
    options.source = home_.data();
    options.target = resident_.device();
    options.unit_bytes = static_cast<int32_t>(RowBytes());
    options.parts = shape.parts;
    options.part_pitch = shape.parts == 1 ? 0 : shape.block_tokens * options.unit_bytes;
    options.ring_bytes = shape.ring_bytes;
    options.workers = shape.workers;
    options.deadline = shape.deadline;
    return options;
  }

  // Draws a step of `rows` rows, each of another sequence or padded. Every sequence has at least
  // `least` tokens to fetch in each of its lists.
  void Draw(int rows, int least = 0) {
    std::vector<int> sequences(Count(shape.slots));
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i] = static_cast<int>(i);
      std::swap(sequences[i], sequences[random_.Below(i + 1)]);
    }
    for (int row = 0; row < rows; ++row) {
      const bool real = row < shape.slots;
      slots_[Count(row)] = real ? sequences[Count(row)] : -1;
      for (int layer = 0; layer < shape.layers; ++layer) {
        for (int head = 0; head < shape.kv_heads; ++head) DrawList(layer, row, head, least);
      }
    }
  }

  // Makes every `n`-th entry of a list one that is skipped.
  void Skip(int n) {
    const int units = shape.max_rows * shape.kv_heads * shape.capacity;
    for (DeviceLists& lists : lists_) {
      for (int i = 0; i < units; i += n) lists.source[Count(i)] = -1;
    }
  }

  // Enqueues a step whose layers fetch on branches, as a policy does.
  void Enqueue(Stream& s, int rows) {
    slots_.ToDevice(s);
    s.Fill(resident_.device(), kPoison, ArenaBytes());
    for (int layer = 0; layer < shape.layers; ++layer) {
      const DeviceLists& lists = lists_[Count(layer)];
      for (const auto* list : {&lists.source, &lists.target, &lists.counts}) list->ToDevice(s);
      Stream& fetches = s.Branch(1 + layer % 2);
      fetches.After(s);
      mover->Move(fetches, layer % RowMover::kSides,
                  {slots_.device(), lists.source.device(), lists.target.device(),
                   lists.counts.device(), rows});
    }
    for (const int branch : {1, 2}) s.After(s.Branch(branch));
    resident_.ToHost(s);
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

  // Checks every byte of HBM that does not belong to a sequence which workers failed.
  void Check(int rows) {
    std::vector<uint8_t> want(ArenaBytes(), kPoison);
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int list = 0; list < rows * shape.kv_heads; ++list) MoveNaively(layer, list, want);
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        if (!Healthy(slot)) continue;
        INFO("layer " << layer << " slot " << slot);
        const size_t at = RowBytes() * static_cast<size_t>(FirstUnit(layer, slot));
        REQUIRE(std::memcmp(resident_.data() + at, want.data() + at,
                            RowBytes() * Count(UnitsOfSequence())) == 0);
      }
    }
  }

  // Puts another sequence into the slot. REQUIRES: the slot is at rest.
  void MoveIn(int slot) {
    FillHome(slot);
    mover->workers()->Join(slot);
  }
  bool Healthy(int slot) const {
    return mover->workers() == nullptr || mover->workers()->Health(slot).ok();
  }
  std::vector<int> Failed() const {
    std::vector<int> out;
    for (int slot = 0; slot < shape.slots; ++slot) {
      if (!Healthy(slot)) out.push_back(slot);
    }
    return out;
  }
  int64_t TokensAsked(int rows) const {
    int64_t tokens = 0;
    for (const DeviceLists& lists : lists_) {
      for (int list = 0; list < rows * shape.kv_heads; ++list) tokens += lists.counts[Count(list)];
    }
    return tokens;
  }

  const Shape shape;
  std::unique_ptr<RowMover> mover;
  std::unique_ptr<Stream> stream;

 private:
  static constexpr uint8_t kPoison = 0xEE;
  using Words = co_attention::Mirrored<int32_t>;
  struct DeviceLists {
    DeviceLists(Device& device, const Shape& of)
        : source(device, Count(of.max_rows * of.kv_heads * of.capacity)),
          target(device, Count(of.max_rows * of.kv_heads * of.capacity)),
          counts(device, Count(of.max_rows * of.kv_heads)) {}
    Words source, target, counts;
  };

  static size_t Count(int count) { return static_cast<size_t>(count); }
  size_t RowBytes() const { return Count(shape.head_dim) * 2; }
  int UnitsOfSequence() const { return shape.blocks * shape.kv_heads * 2 * shape.block_tokens; }
  int FirstUnit(int layer, int slot) const {
    return (layer * shape.slots + slot) * UnitsOfSequence();
  }
  size_t ArenaBytes() const { return RowBytes() * Count(FirstUnit(shape.layers, 0)); }
  int KeyUnit(int layer, int slot, int head, int token) const {
    const int page = token / shape.block_tokens, offset = token % shape.block_tokens;
    return FirstUnit(layer, slot) + (page * shape.kv_heads + head) * 2 * shape.block_tokens +
           offset;
  }

  void FillHome(int slot) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      uint8_t* const rows = home_.as<uint8_t>() + RowBytes() * Count(FirstUnit(layer, slot));
      for (size_t i = 0; i < RowBytes() * Count(UnitsOfSequence()); ++i) {
        rows[i] = static_cast<uint8_t>(random_());
      }
    }
  }

  // Draws other tokens, in order, for sources and for targets.
  void DrawList(int layer, int row, int head, int least) {
    const DeviceLists& lists = lists_[Count(layer)];
    const int list = row * shape.kv_heads + head, slot = slots_[Count(row)];
    const bool empty = slot < 0 || (least == 0 && random_.Below(3) == 0);
    const int count =
        empty ? 0 : std::max(least, static_cast<int>(random_.Below(Count(shape.capacity + 1))));
    lists.counts[Count(list)] = count;
    for (const Words* units : {&lists.source, &lists.target}) {
      const int tokens = shape.blocks * shape.block_tokens;
      int token = static_cast<int>(random_.Below(Count(tokens)));
      for (int i = 0; i < count; ++i) {
        token = (token + 1 + static_cast<int>(random_.Below(2))) % tokens;
        (*units)[Count(list * shape.capacity + i)] = KeyUnit(layer, slot, head, token);
      }
    }
  }

  void MoveNaively(int layer, int list, std::vector<uint8_t>& resident) const {
    const DeviceLists& lists = lists_[Count(layer)];
    for (int i = 0; i < lists.counts[Count(list)]; ++i) {
      const size_t entry = Count(list * shape.capacity + i);
      if (lists.source[entry] < 0) continue;
      for (int part = 0; part < shape.parts; ++part) {  // K, V
        const size_t from = RowBytes() * Count(lists.source[entry] + part * shape.block_tokens);
        const size_t to = RowBytes() * Count(lists.target[entry] + part * shape.block_tokens);
        std::memcpy(resident.data() + to, home_.as<uint8_t>() + from, RowBytes());
      }
    }
  }

  Device& device_;
  SplitMix64 random_;
  Words slots_;
  Buffer home_;
  co_attention::Mirrored<uint8_t> resident_;
  std::vector<DeviceLists> lists_;  // by layer
  std::unique_ptr<Event> done_;
};

}  // namespace sluice::row_mover
