// New anchors of sequences that grow: at which rows they are taken and begin to count, and that
// their numbers are those of the operator. A sequence's tokens and digests are made beforehand, and
// steps consist of what HeadBudgets does in them.
#include "src/attention/policies/fluxion/growing_anchors.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/attention/policies/fluxion/block_digests.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policies/fluxion/head_budgets.h"
#include "src/base/dtype.h"
#include "src/device/kernel_set.h"
#include "src/kv/sequence_cache.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"
#include "tests/unit/attention/constant_predictor.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::ConstantPredictor;
using testing::PolicyRig;

// What a layer's table has for a slot.
using Numbers = std::vector<float>;

class Growth {
 public:
  explicit Growth(const PolicyRig::Shape& shape)
      : make_(testing::RandomVectors(shape, 0)), rig_(shape, make_) {
    PolicyOptions options = rig_.Options();
    options.budget_tokens = 64;
    options.dense_layers = 1;
    options.fluxion.predictor = ConstantPredictor({1, 1, 1, 1}, false);
    shape_ = FluxionShapeOf(options, shape.slots);
    tier_ = OrFail(OffloadTier::Create(TierOptions(options)));
    budgets_ = OrFail(HeadBudgets::Create(options, shape_, tier_.get()));
    reference_ = std::make_unique<AnchorTable>(OrFail(AnchorTable::Create(device(), shape_)));
    const int64_t scratch =
        kernels::AnchorScratchBytes(shape.max_context, shape.heads, shape.head_dim);
    scratch_ = Memory(MemoryKind::kDevice, scratch);
    q_ = Memory(MemoryKind::kPinned, int64_t{shape.layers} * shape.slots * Width() * 4);
    row_ = Memory(MemoryKind::kPinned, 2 * 4);
    stream_ = device()->NewStream(Device::StreamKind::kCompute);
    done_ = device()->NewEvent();
  }

  // Puts a sequence of `total` tokens into the slot, of which `prompt` are its prompt.
  void Admit(int slot, uint64_t seed, int prompt, int total) {
    TokensByKind tokens = tier_->FootprintOf(total, total).dram_tokens;
    auto home = std::make_unique<SequenceCache>(&rig_.dram(), rig_.dram().TryReserve(tokens));
    home->EnsureTokens(total);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int token = 0; token < total; ++token) Put(*home, layer, token, seed);
    }
    REQUIRE(tier_->Admit(slot, total, total, home));
    tier_->WarmEvent(slot).Wait();
    seeds_[slot] = seed;
    budgets_->Joined(slot);
    const OffloadTier::BulkRow row = Row(slot, total - 1);
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      kernels::LevelDigestsParams digests{};
      digests.cache = tier_->Home(layer);
      digests.digests = FluxionDigests(*tier_, shape_, layer);
      digests.slots = row.slots;
      digests.first_positions = row.first_positions;
      digests.positions = row.positions;
      digests.rows = 1;
      device()->kernels().LevelDigests(*stream_, digests);
    }
    SelectionHints hints;
    if (prompt >= kHinted) {
      for (int layer = 0; layer < shape_.layers; ++layer) {
        const std::vector<float> q = make_(seed, layer, prompt - 1).q;
        hints.queries.insert(hints.queries.end(), q.begin(), q.end());
      }
    }
    budgets_->EndPrompt(slot, prompt, hints);
    const OffloadTier::BulkRow anchor = Row(slot, prompt - 1);
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      budgets_->MakeAnchor(*stream_, layer, slot, anchor);
    }
    Finish();
  }
  void Leave(int slot) {
    Finish();
    budgets_->Left(slot);
    tier_->Release(slot);
  }

  // Begins a step of another slot that the device reaches late, while the anchor of `slot` is to be
  // measured, and takes the sequence of `slot` away meanwhile. Returns whether that took until the
  // device was there.
  bool LeavesLate(int slot, int other, int position) {
    constexpr size_t kBytes = size_t{32} << 20;
    const Buffer memory = Memory(MemoryKind::kPinned, kBytes);
    const std::unique_ptr<Event> late = device()->NewEvent();
    const std::unique_ptr<Stream> busy = device()->NewStream(Device::StreamKind::kCopy);
    for (int i = 0; i < 20; ++i) busy->Fill(memory.data(), 1, kBytes);
    busy->Record(*late);
    stream_->WaitFor(*late);
    budgets_->BeginStep(*stream_, {other}, {position});
    budgets_->Left(slot);
    const bool was_late = late->Ready();
    Finish();
    tier_->Release(slot);
    return was_late;
  }

  // A step of these rows. Its device work is done on return; what is measured may not be.
  void Step(const std::vector<int32_t>& slots, const std::vector<int32_t>& positions) {
    budgets_->BeginStep(*stream_, slots, positions);
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      float* const q = q_.as<float>() + int64_t{layer} * shape_.slots * Width();
      for (size_t row = 0; row < slots.size(); ++row) {
        const std::vector<float> of = make_(seeds_.at(slots[row]), layer, positions[row]).q;
        std::copy(of.begin(), of.end(), q + static_cast<int64_t>(row) * Width());
      }
      KvAttention::Queries queries{};
      queries.q = q;
      queries.stride = Width();
      budgets_->Keep(*stream_, layer, queries);
    }
    Finish();
  }

  // Returns what counts for the slot in a layer.
  Numbers Counting(int layer, int slot) { return Read(budgets_->anchors(layer), slot); }
  // Returns what the operator says of the anchor at `position`.
  Numbers Direct(int layer, int slot, int position) {
    const std::vector<float> q = make_(seeds_.at(slot), layer, position).q;
    std::copy(q.begin(), q.end(), q_.as<float>());
    const OffloadTier::BulkRow row = Row(slot, position);
    kernels::AnchorStatisticsParams params{};
    params.q = q_.as<float>();
    params.q_stride = Width();
    params.slots = row.slots;
    params.positions = row.positions;
    params.cache = tier_->Home(layer);
    params.digests = FluxionDigests(*tier_, shape_, layer);
    params.anchors = reference_->Of(layer);
    params.scratch = scratch_.data();
    params.rows = 1;
    params.heads = shape_.heads;
    params.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
    params.tau = 0.1f;
    device()->kernels().AnchorStatistics(*stream_, params);
    Finish();
    return Read(params.anchors, slot);
  }
  // Checks that the anchor at `position` counts in all sparse layers; -1: there is none.
  void CheckAnchor(int slot, int position) {
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      INFO("slot " << slot << ", layer " << layer << ", anchor at " << position);
      const Numbers counting = Counting(layer, slot);
      const auto is_nan = [](float x) { return std::isnan(x); };
      if (position < 0) {
        CHECK(std::all_of(counting.begin(), counting.end(), is_nan));
      } else {
        CHECK(std::all_of(counting.begin(), counting.end(), [](float x) { return x == x; }));
        CHECK(counting == Direct(layer, slot, position));
      }
    }
  }

  // The prefill node hints at the queries of prompts of so many tokens or more.
  static constexpr int kHinted = 384;

 private:
  Device* device() { return &rig_.device(); }
  int64_t Width() const { return int64_t{shape_.heads} * shape_.head_dim; }
  Buffer Memory(MemoryKind kind, int64_t bytes) {
    return OrFail(device()->Allocate(kind, static_cast<size_t>(bytes), "test"));
  }
  void Finish() {
    stream_->Record(*done_);
    done_->Wait();
  }
  OffloadTierOptions TierOptions(const PolicyOptions& options) {
    OffloadTierOptions out;
    out.device = options.device;
    out.hbm = options.hbm;
    out.dram = options.dram;
    out.slots = options.slots;
    out.max_context = options.max_context;
    out.dense_layers = shape_.dense_layers;
    out.ring_blocks = shape_.ring_units;
    out.recall_blocks = shape_.recall_units();
    out.unit_tokens = shape_.unit_tokens;
    out.arrays = FluxionDigestArrays(shape_, /*in_dram=*/false);
    return out;
  }
  OffloadTier::BulkRow Row(int slot, int position) {
    Finish();
    auto* const row = row_.as<int32_t>();
    row[0] = slot;
    row[1] = position;
    return {row, zero_.as<int32_t>(), row + 1};
  }
  void Put(const SequenceCache& home, int layer, int token, uint64_t seed) {
    const int block_tokens = rig_.shape().block_tokens;
    const PolicyRig::Vectors vectors = make_(seed, layer, token);
    for (int head = 0; head < shape_.kv_heads; ++head) {
      auto* const block =
          reinterpret_cast<uint16_t*>(home.BlockAddress(layer, 0, head, token / block_tokens));
      for (int part = 0; part < 2; ++part) {
        const std::vector<float>& from = part == 0 ? vectors.k : vectors.v;
        uint16_t* const to = block + (part * block_tokens + token % block_tokens) * shape_.head_dim;
        for (int d = 0; d < shape_.head_dim; ++d) {
          to[d] = FloatToBFloat16(from[static_cast<size_t>(head * shape_.head_dim + d)]);
        }
      }
    }
  }
  Numbers Read(const kernels::FluxionAnchors& anchors, int slot) {
    const int64_t kv = int64_t{shape_.kv_heads} * (kernels::kAnchorKvNumbers + shape_.head_dim);
    const int64_t heads = int64_t{shape_.heads} * (kernels::kAnchorHeadNumbers + shape_.head_dim);
    Numbers out = rig_.Read(anchors.kv + slot * kv, static_cast<size_t>(kv));
    const Numbers of_heads = rig_.Read(anchors.heads + slot * heads, static_cast<size_t>(heads));
    out.insert(out.end(), of_heads.begin(), of_heads.end());
    out.push_back(rig_.Read(anchors.resident + slot, 1)[0]);
    return out;
  }

  const PolicyRig::Make make_;
  PolicyRig rig_;
  FluxionShape shape_;
  std::unique_ptr<OffloadTier> tier_;
  std::unique_ptr<HeadBudgets> budgets_;
  std::unique_ptr<AnchorTable> reference_;
  Buffer scratch_, q_, row_, zero_ = Memory(MemoryKind::kPinned, 4);
  std::map<int, uint64_t> seeds_;
  std::unique_ptr<Event> done_;
  std::unique_ptr<Stream> stream_;
};

PolicyRig::Shape ShapeOf(int layers, int max_context) {
  PolicyRig::Shape shape;
  shape.layers = layers;
  shape.max_context = max_context;
  return shape;
}

TEST_CASE("the positions of anchors follow from the sequence's length alone") {
  CHECK_FALSE(IsNextAnchor(0, 639));  // a cpu segment of 192 tokens
  CHECK(IsNextAnchor(0, 640));        // 320 tokens
  CHECK(AnchorDelay(0, 640) == 32);
  CHECK(AnchorDelay(0, 32768) == 32);
  CHECK_FALSE(IsNextAnchor(640, 959));
  CHECK(IsNextAnchor(640, 960));
  CHECK(AnchorDelay(640, 960) == 120);
  CHECK(AnchorDelay(384, 576) == 72);
  CHECK_FALSE(IsNextAnchor(32768, 49151));
  CHECK(IsNextAnchor(32768, 49152));
}

TEST_CASE("an answer's rows become anchors, whose numbers are the operator's") {
  // There are more layers than steps before the first anchor counts, so that its step does some.
  const int layers = GENERATE(3, 40);
  Growth growth(ShapeOf(layers, 1300));
  growth.Admit(1, TestSeed(), 100, 1200);
  std::map<int, int> counts = {{100, -1}, {639, -1}, {670, -1}};
  counts.insert({{671, 639}, {959, 639}, {1078, 639}, {1079, 959}, {1199, 959}});
  for (int position = 100; position < 1200; ++position) {
    growth.Step({1}, {position});
    if (counts.contains(position)) growth.CheckAnchor(1, counts[position]);
  }
  growth.Leave(1);
}

TEST_CASE("a sequence with an anchor gets the next one when it has grown by half") {
  Growth growth(ShapeOf(3, 1100));
  growth.Admit(0, TestSeed(), 400, 700);
  growth.Admit(2, TestSeed() + 1, 700, 1100);
  for (int step = 0; step < 300; ++step) {
    INFO("step " << step);
    const bool parked = step >= 100 && step < 200;
    if (parked) {
      growth.Step({0}, {400 + step});
    } else {
      growth.Step({2, 0}, {700 + step - (step < 100 ? 0 : 100), 400 + step});
    }
    // The row at 599 has 600 tokens and counts 75 rows later.
    if (step == 0 || step == 273) growth.CheckAnchor(0, 399);
    if (step == 274) growth.CheckAnchor(0, 599);
    if (step == 299) growth.CheckAnchor(2, 699);
  }
  // The row at 1,049 would count 131 rows later.
  for (int position = 900; position < 1100; ++position) growth.Step({2}, {position});
  growth.CheckAnchor(2, 699);
  growth.Leave(0);
  growth.Leave(2);
}

TEST_CASE("sequences that grow together have an anchor each, at the same row") {
  Growth growth(ShapeOf(12, 1600));
  for (int slot = 0; slot < 4; ++slot) {
    growth.Admit(slot, TestSeed() + static_cast<uint64_t>(slot), 300, 720);
  }
  for (int position = 630; position < 672; ++position) {
    growth.Step({3, 0, 2, 1}, std::vector<int32_t>(4, position));
    for (int slot = 0; slot < 4 && position >= 670; ++slot) {
      growth.CheckAnchor(slot, position == 670 ? -1 : 639);
    }
  }
  for (int slot = 0; slot < 4; ++slot) growth.Leave(slot);
}

TEST_CASE("a sequence may leave while its anchor is measured") {
  Growth growth(ShapeOf(12, 1100));
  for (const int steps : {1, 2, 5, 31, 32}) {
    INFO(steps << " steps from its anchor on");
    growth.Admit(0, TestSeed(), 100, 700);
    for (int i = 0; i < steps; ++i) growth.Step({0}, {639 + i});
    growth.Leave(0);
    growth.Admit(0, TestSeed() + 1, 900, 1000);
    for (int i = 0; i < 40; ++i) growth.Step({0}, {900 + i});
    growth.CheckAnchor(0, 899);
    growth.Leave(0);
    growth.Admit(0, TestSeed() + 2, 100, 700);
    for (int position = 600; position < 671; ++position) growth.Step({0}, {position});
    growth.CheckAnchor(0, -1);
    growth.Step({0}, {671});
    growth.CheckAnchor(0, 639);
    growth.Leave(0);
  }
}

TEST_CASE("a sequence leaves only when nothing reads its caches any more") {
  Growth growth(ShapeOf(3, 1100));
  growth.Admit(0, TestSeed(), 100, 700);
  growth.Admit(1, TestSeed() + 1, 100, 700);
  growth.Step({0}, {639});
  CHECK(growth.LeavesLate(0, 1, 200));
  growth.Leave(1);
}

}  // namespace
}  // namespace sluice
