// Tests the ring of a draft layer's caches: rows attend to the newest entries as they would over a
// cache that forgets nothing, however far the sequence goes and whatever refuted rows have written.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "kernels/latent_params.h"
#include "src/attention/latent/draft_window.h"
#include "src/attention/latent/latent_views.h"
#include "src/base/rng.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kSlots = 3, kHeads = 2, kRank = 32, kRope = 16, kBlock = 16, kMaxRows = 12;
constexpr int64_t kContext = 400, kWindow = 37;
constexpr int kEntry = kRank + kRope;

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "latent";
  kind.element_type = DType::kFloat32;
  kind.heads = 1;
  kind.block_tokens = kBlock;
  kind.SetEqualParts(1, kernels::EntryBytes(DType::kFloat32, kRank, kRope));
  return {1, {kind}};
}

// The rows of a step, and what both caches are given.
class Rig {
 public:
  Rig() : device_(OrFail(testing::TestDevice("portable"))), layout_(Layout()) {
    DraftWindow::Options options;
    options.device = device_.get();
    options.layout = &layout_;
    options.heads = kHeads;
    options.rank = kRank;
    options.rope = kRope;
    options.slots = kSlots;
    options.max_rows = options.decode_rows = kMaxRows;
    options.max_context = kContext;
    options.window = kWindow;
    window = OrFail(DraftWindow::Create(options));
    stream = device_->NewStream(Device::StreamKind::kCompute);
    done_ = device_->NewEvent();
    norm_.assign(kRank, 1.0f);
    turn_.assign(kMaxRows * kRope, 0.0f);
    for (size_t i = 0; i < turn_.size(); i += 2) turn_[i] = 1.0f;  // no turn
    // A cache in which every position has its place.
    constexpr int64_t kBlocks = kContext / kBlock;
    all_.resize(static_cast<size_t>(kSlots * kContext * kEntry));
    for (int32_t page = 0; page < kSlots * kBlocks; ++page) pages_.push_back(page);
    whole_ = {all_.data(), pages_.data(), kBlocks, layout_.kinds[0].page_bytes(),
              kBlock,      kRank,         kRope,   DType::kFloat32};
  }

  // Writes the rows' entries, and compares what they attend to from `begins` on.
  void Step(const std::vector<int32_t>& slots, const std::vector<int32_t>& positions,
            const std::vector<int32_t>& begins, SplitMix64& random) {
    const auto rows = static_cast<int32_t>(slots.size());
    const auto draw = [&random](size_t count) {
      std::vector<float> out(count);
      for (float& value : out) value = static_cast<float>(random.Uniform() - 0.5);
      return out;
    };
    const std::vector<float> kv = draw(slots.size() * kEntry);
    const std::vector<float> q = draw(slots.size() * kHeads * kEntry);
    kernels::LatentAppendParams entry{};
    entry.kv = kv.data();
    entry.kv_stride = kEntry;
    entry.norm = norm_.data();
    entry.cos_sin = turn_.data();
    entry.slots = slots.data();
    entry.positions = positions.data();
    entry.rows = entry.decode_rows = rows;
    entry.epsilon = 1e-6f;
    window->AppendLatent(*stream, 0, entry, 0);
    entry.cache = whole_;
    device_->kernels().LatentAppend(*stream, entry);

    const auto no_queries = [](Stream&) {};
    std::vector<float> got(slots.size() * kHeads * kRank), want(got.size());
    LatentAttention::Params attend{.make_queries = no_queries};
    attend.q = q.data();
    attend.slots = slots.data();
    attend.positions = positions.data();
    attend.rows = attend.decode_rows = rows;
    attend.heads = kHeads;
    attend.scale = 3;
    attend.out = got.data();
    window->AttendLatent(*stream, 0, attend);

    std::vector<int32_t> lists(slots.size() * kWindow), counts(slots.size());
    for (size_t row = 0; row < slots.size(); ++row) {
      if (slots[row] < 0) continue;
      const int32_t begin = begins[static_cast<size_t>(slots[row])];
      for (int64_t at = std::max<int64_t>(begin, positions[row] - kWindow + 1);
           at <= positions[row]; ++at) {
        lists[row * kWindow + static_cast<size_t>(counts[row]++)] = static_cast<int32_t>(at);
      }
    }
    std::vector<uint8_t> scratch(static_cast<size_t>(
        device_->kernels().SparseMlaScratchBytes(kMaxRows, kHeads, kRank, kWindow)));
    kernels::SparseMlaParams mla{};
    mla.q = q.data();
    mla.q_type = device_->kernels().activation_type();
    mla.slots = slots.data();
    mla.cache = whole_;
    mla.entries = lists.data();
    mla.counts = counts.data();
    mla.capacity = kWindow;
    mla.out = want.data();
    mla.scratch = scratch.data();
    mla.scratch_bytes = static_cast<int64_t>(scratch.size());
    mla.rows = mla.decode_rows = rows;
    mla.heads = kHeads;
    mla.scale = 3;
    mla.out_type = DType::kFloat32;
    device_->kernels().SparseMla(*stream, mla);
    stream->Record(*done_);
    done_->Wait();
    REQUIRE(got == want);
  }

  std::unique_ptr<DraftWindow> window;
  std::unique_ptr<Stream> stream;

 private:
  std::unique_ptr<Device> device_;
  const CacheLayout layout_;
  std::unique_ptr<Event> done_;
  std::vector<float> norm_, turn_, all_;
  std::vector<int32_t> pages_;
  kernels::PagedLatents whole_{};
};

}  // namespace

TEST_CASE("a draft layer's ring serves the newest entries as a whole cache would") {
  SplitMix64 random(TestSeed());
  Rig rig;
  std::vector<int32_t> begins, next;
  for (int slot = 0; slot < kSlots; ++slot) {
    begins.push_back(static_cast<int32_t>(random.Below(100)));
    rig.window->Begin(*rig.stream, slot, begins.back());
    next.push_back(begins.back());
  }
  while (*std::max_element(next.begin(), next.end()) < kContext - 4) {
    std::vector<int32_t> slots, positions;
    for (int slot = 0; slot < kSlots; ++slot) {
      int32_t& at = next[static_cast<size_t>(slot)];
      const auto rows = static_cast<int32_t>(1 + random.Below(4));
      for (int32_t i = 0; i < rows; ++i) {
        slots.push_back(slot);
        positions.push_back(at + i);
      }
      // Only some of the rows are accepted; the next ones begin behind those.
      at += static_cast<int32_t>(1 + random.Below(static_cast<uint64_t>(rows)));
    }
    rig.Step(slots, positions, begins, random);
  }
  CHECK(*std::min_element(next.begin(), next.end()) > 2 * kWindow);
}

}  // namespace sluice
