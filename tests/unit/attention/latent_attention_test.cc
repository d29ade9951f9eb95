// Tests policy `full` over latent caches, against attention computed here from copies of the
// caches.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/attention/latent/prompt_selections.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/attention/policy_factory.h"
#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/kernel_set.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 2, kSlots = 3, kHeads = 2, kRank = 24, kRope = 8, kEntry = kRank + kRope;
constexpr int kIndexHeads = 3, kTopK = 16, kMaxRows = 48, kDim = kernels::kIndexDim;
// So long that the scores of a step of kMaxRows do not fit into the scratch at once.
constexpr int64_t kMaxContext = int64_t{1} << 20;

CacheLayout Layout(bool indexed) {
  CacheKind latent, index;
  latent.name = "latent";
  latent.element_type = DType::kFloat32;
  latent.heads = 1;
  latent.block_tokens = 16;
  latent.SetEqualParts(1, kEntry * 4);
  index = latent;
  index.name = "index";
  index.block_tokens = 32;
  index.SetEqualParts(1, kDim * 4);
  CacheLayout layout{kLayers, {latent}};
  if (indexed) layout.kinds.push_back(index);
  return layout;
}

using Row = std::vector<float>;

struct World {
  explicit World(bool with_indexer) : indexed(with_indexer) {
    device = *NewCpuDevice({"reference", 1});
    const CacheLayout layout = Layout(indexed);
    hbm = *PagePool::Create("hbm", layout, *device->Allocate(MemoryKind::kDevice, 8 << 20, "hbm"));
    dram =
        *PagePool::Create("dram", layout, *device->Allocate(MemoryKind::kPinned, 8 << 20, "dram"));
    PolicyOptions options = PolicyOver(device.get(), hbm.get(), kSlots, kMaxContext, dram.get());
    options.heads = kHeads;
    options.latent_rank = kRank;
    options.index_top_k = indexed ? kTopK : 0;
    options.max_rows = kMaxRows;
    policy = *NewFullPolicy(options);
    stream = device->NewStream(Device::StreamKind::kCompute);
    for (auto* caches : {&entries, &keys}) {
      caches->assign(kLayers, std::vector<std::vector<Row>>(kSlots));
    }
  }
  ~World() {
    for (int slot = 0; slot < kSlots; ++slot) {
      if (!entries[0][static_cast<size_t>(slot)].empty()) policy->Release(slot);
    }
  }

  float Uniform() { return static_cast<float>(2 * random.Uniform() - 1); }
  Row RandomRow(int64_t elements) {
    Row row(static_cast<size_t>(elements));
    for (float& x : row) x = Uniform();
    return row;
  }
  std::vector<Row>& Of(std::vector<std::vector<std::vector<Row>>>& caches, int layer, int slot) {
    return caches[static_cast<size_t>(layer)][static_cast<size_t>(slot)];
  }

  // Admits a sequence whose first `context` tokens come from a host cache.
  void Admit(int slot, int64_t context, int64_t total) {
    std::unique_ptr<SequenceCache> home;
    if (context > 0) {
      home = std::make_unique<SequenceCache>(dram.get(), dram->TryReserve(context));
      home->EnsureTokens(context);
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int64_t t = 0; t < context; ++t) {
        Of(entries, layer, slot).push_back(RandomRow(kEntry));
        Of(keys, layer, slot).push_back(RandomRow(kDim));
        const auto put = [&](size_t kind, const Row& row) {
          const int64_t block = hbm->layout().kinds[kind].block_tokens;
          std::copy(row.begin(), row.end(),
                    reinterpret_cast<float*>(home->BlockAddress(layer, kind, 0, t / block)) +
                        t % block * std::ssize(row));
        };
        put(0, Of(entries, layer, slot).back());
        if (indexed) put(1, Of(keys, layer, slot).back());
      }
    }
    REQUIRE(policy->Admit(slot, context, total, Promise::kFirm, home));
    policy->WarmEvent(slot).Wait();
    REQUIRE(policy->Warm(slot));
  }

  struct Rows {
    int slot;
    int32_t first, count;
  };
  // Runs a step with new tokens at these rows, the first `decode_rows` of them decode rows, and
  // checks every layer's results.
  void Step(const std::vector<Rows>& planned, int32_t decode_rows) {
    std::vector<int32_t> slots, positions;
    for (const Rows& rows : planned) {
      REQUIRE(policy->Grow(rows.slot, rows.first + rows.count));
      for (int32_t i = 0; i < rows.count; ++i) {
        slots.push_back(rows.slot);
        positions.push_back(rows.first + i);
      }
    }
    const auto count = slots.size();
    policy->BeginStep(*stream, slots, positions);
    for (int layer = 0; layer < kLayers; ++layer) Layer(layer, slots, positions, decode_rows);
    steps += static_cast<int>(count > 0);
  }

  void Layer(int layer, const std::vector<int32_t>& slots, const std::vector<int32_t>& positions,
             int32_t decode_rows) {
    const auto rows = static_cast<int32_t>(slots.size());
    // RoPE by no angle, and norms of ones.
    Row turn(static_cast<size_t>(rows) * kDim);
    for (size_t i = 0; i < turn.size(); i += 2) turn[i] = 1;
    const Row ones(kDim, 1.0f), zeros(kDim, 0.0f);
    const Row kv = RandomRow(int64_t{rows} * kEntry), k = RandomRow(int64_t{rows} * kDim);
    kernels::LatentAppendParams append{};
    append.kv = kv.data();
    append.kv_stride = kEntry;
    append.norm = ones.data();
    append.cos_sin = turn.data();
    append.slots = slots.data();
    append.positions = positions.data();
    append.rows = rows;
    append.decode_rows = decode_rows;
    append.epsilon = 1e-6f;
    policy->latent_attention()->AppendLatent(*stream, layer, append, 0);
    kernels::IndexAppendParams index{};
    index.k = k.data();
    index.k_stride = kDim;
    index.norm_weight = ones.data();
    index.norm_bias = zeros.data();
    index.cos_sin = turn.data();
    index.slots = slots.data();
    index.positions = positions.data();
    index.rows = rows;
    index.rope_dim = 16;
    index.epsilon = 1e-6f;
    if (indexed) policy->latent_attention()->AppendIndex(*stream, layer, index);
    for (int32_t r = 0; r < rows; ++r) {
      Row entry(kv.begin() + r * kEntry, kv.begin() + (r + 1) * kEntry);
      Row key(k.begin() + r * kDim, k.begin() + (r + 1) * kDim);
      double squares = 0, sum = 0, deviation = 0;
      for (int i = 0; i < kRank; ++i) squares += double{entry[i]} * entry[i];
      for (int i = 0; i < kRank; ++i) {
        entry[i] = static_cast<float>(entry[i] / std::sqrt(squares / kRank + 1e-6));
      }
      for (const float x : key) sum += x / kDim;
      for (const float x : key) deviation += (x - sum) * (x - sum) / kDim;
      for (float& x : key) x = static_cast<float>((x - sum) / std::sqrt(deviation + 1e-6));
      const int slot = slots[static_cast<size_t>(r)];
      REQUIRE(std::ssize(Of(entries, layer, slot)) == positions[static_cast<size_t>(r)]);
      Of(entries, layer, slot).push_back(entry);
      Of(keys, layer, slot).push_back(key);
    }

    const Row q = RandomRow(int64_t{rows} * kHeads * kEntry);
    const Row index_q = RandomRow(int64_t{rows} * kIndexHeads * kDim);
    const Row weights = RandomRow(int64_t{rows} * kIndexHeads);
    Row out(static_cast<size_t>(rows) * kHeads * kRank, NAN);
    int made = 0;
    const auto make = [&](Stream&) { ++made; };
    LatentAttention::Params attention{.make_queries = make};
    attention.index_q = indexed ? index_q.data() : nullptr;
    attention.index_weights = weights.data();
    attention.index_heads = kIndexHeads;
    attention.top_k = indexed ? kTopK : 0;
    attention.q = q.data();
    attention.slots = slots.data();
    attention.positions = positions.data();
    attention.rows = rows;
    attention.decode_rows = decode_rows;
    attention.heads = kHeads;
    attention.scale = 0.25f;
    attention.out = out.data();
    policy->latent_attention()->AttendLatent(*stream, layer, attention);
    const std::unique_ptr<Event> done = device->NewEvent();
    stream->Record(*done);
    done->Wait();
    REQUIRE(made == 1);
    for (int32_t r = 0; r < rows; ++r) {
      const int slot = slots[static_cast<size_t>(r)];
      const std::vector<int32_t> list =
          Selected(Of(keys, layer, slot), positions[static_cast<size_t>(r)],
                   index_q.data() + r * kIndexHeads * kDim, weights.data() + r * kIndexHeads);
      for (int head = 0; head < kHeads; ++head) {
        CheckHead(Of(entries, layer, slot), list, q.data() + (r * kHeads + head) * kEntry,
                  out.data() + (r * kHeads + head) * kRank);
      }
    }
  }

  std::vector<int32_t> Selected(const std::vector<Row>& keys_of, int32_t position,
                                const float* index_q, const float* weights) const {
    std::vector<int32_t> all(static_cast<size_t>(position) + 1);
    std::iota(all.begin(), all.end(), 0);
    if (!indexed || std::ssize(all) <= kTopK) return all;
    std::vector<double> scores;
    for (int32_t t = 0; t <= position; ++t) {
      double score = 0;
      for (int head = 0; head < kIndexHeads; ++head) {
        double product = 0;
        for (int i = 0; i < kDim; ++i) {
          product += double{index_q[head * kDim + i]} * keys_of[static_cast<size_t>(t)][i];
        }
        score += weights[head] * std::max(product, 0.0);
      }
      scores.push_back(score);
    }
    std::stable_sort(all.begin(), all.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    all.resize(kTopK);
    std::sort(all.begin(), all.end());
    return all;
  }

  static void CheckHead(const std::vector<Row>& of, const std::vector<int32_t>& list,
                        const float* q, const float* out) {
    double sum = 0;
    std::vector<double> wanted(kRank, 0.0);
    for (const int32_t t : list) {
      const Row& entry = of[static_cast<size_t>(t)];
      double score = 0;
      for (int i = 0; i < kEntry; ++i) score += double{q[i]} * entry[i];
      const double weight = std::exp(0.25 * score);
      sum += weight;
      for (int i = 0; i < kRank; ++i) wanted[static_cast<size_t>(i)] += weight * entry[i];
    }
    for (int i = 0; i < kRank; ++i) {
      REQUIRE(out[i] == Approx(wanted[static_cast<size_t>(i)] / sum).margin(2e-5));
    }
  }

  const bool indexed;
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<FullPolicy> policy;
  std::unique_ptr<Stream> stream;
  std::vector<std::vector<std::vector<Row>>> entries, keys;  // [layer][slot][position]
  SplitMix64 random{TestSeed()};
  int steps = 0;
};

TEST_CASE("full attends to what the indexer selects, in steps of any rows") {
  for (const bool indexed : {true, false}) {
    World world(indexed);
    world.Admit(0, 70, 200);
    world.Admit(2, 5, 100);
    world.Admit(1, 0, 150);
    world.Step({{0, 70, 1}, {2, 5, 1}}, 2);
    // One to six decode rows of a sequence, and a prompt in chunks.
    world.Step({{2, 6, 6}, {0, 71, 2}, {1, 0, 40}}, 8);
    world.Step({{0, 73, 1}, {1, 40, 30}}, 1);
    world.Step({{1, 70, kMaxRows}}, 0);
    world.Step({{0, 74, 4}, {1, 118, 1}, {2, 12, 3}}, 8);
    for (int i = 0; i < 20; ++i) world.Step({{0, 78 + i, 1}, {1, 119 + i, 1}}, 2);
    REQUIRE(world.steps == 25);
  }
}

TEST_CASE("who watches selections sees every row's list, behind its layer's selection") {
  World world(true);
  std::vector<int32_t> counts;
  world.policy->ObserveSelections([&](Stream& stream, int layer, const kernels::UnitLists& lists,
                                      int32_t first_row, int32_t rows) {
    REQUIRE(lists.capacity == kTopK);
    REQUIRE(first_row == 0);
    REQUIRE(rows == 20);
    if (layer != 1) return;
    const std::unique_ptr<Event> done = world.device->NewEvent();
    stream.Record(*done);
    done->Wait();
    counts.assign(lists.counts, lists.counts + rows);
  });
  world.Admit(0, 0, 100);
  world.Step({{0, 0, 20}}, 0);
  for (int32_t r = 0; r < 20; ++r) CHECK(counts[static_cast<size_t>(r)] == std::min(r + 1, kTopK));
  world.policy->ObserveSelections(nullptr);
  world.Step({{0, 20, 5}}, 0);
}

TEST_CASE("a prompt's last selections are kept, whatever its chunks") {
  constexpr int kRows = 100, kPositions = PromptSelections::kPositions;
  const std::unique_ptr<Device> device = *NewCpuDevice({"portable", 1});
  const std::unique_ptr<Stream> stream = device->NewStream(Device::StreamKind::kCompute);
  SplitMix64 random(TestSeed());
  const auto kept = *PromptSelections::Create(
      {.device = device.get(), .layers = 2, .top_k = 4, .slots = 4, .prompts = 2});
  std::vector<int32_t> units(kRows * 4), counts(kRows);
  const kernels::UnitLists lists{units.data(), counts.data(), 4};
  // Slot s has p % 5 units in layer l at position p, the first of them 1000 * s + 10 * p + l.
  const auto step = [&](const std::vector<int32_t>& slots, const std::vector<int32_t>& positions,
                        bool in_two) {
    kept->BeginStep(slots, positions);
    const auto rows = static_cast<int32_t>(slots.size());
    for (int layer = 0; layer < 2; ++layer) {
      for (size_t r = 0; r < slots.size(); ++r) {
        counts[r] = positions[r] % 5;
        units[4 * r] = 1000 * slots[r] + 10 * positions[r] + layer;
      }
      const int32_t half = in_two ? rows / 2 : rows;
      kept->Keep(*stream, layer, lists, 0, half);
      kept->Keep(*stream, layer, lists, half, rows - half);
      const std::unique_ptr<Event> done = device->NewEvent();
      stream->Record(*done);
      done->Wait();
    }
  };
  for (int round = 0; round < 50; ++round) {
    REQUIRE(kept->Begin(1));
    REQUIRE(kept->Begin(3));
    CHECK_FALSE(kept->Begin(2));
    CHECK(kept->Read(*stream, 1).units.empty());
    const auto start = static_cast<int32_t>(random.Below(40));
    int32_t next[2] = {start, 0};
    for (int s = 0; s < 6; ++s) {
      std::vector<int32_t> slots = {2}, positions = {7};  // another slot
      for (const int i : {0, 1}) {
        for (int n = static_cast<int>(random.Below(45)); n > 0; --n) {
          slots.push_back(i == 0 ? 3 : 1);
          positions.push_back(next[i]++);
        }
      }
      step(slots, positions, random.Below(2) == 0);
    }
    for (const int i : {0, 1}) {
      const int slot = i == 0 ? 3 : 1;
      const PromptSelections::Lists read = kept->Read(*stream, slot);
      const int64_t first = std::max<int64_t>(i == 0 ? start : 0, next[i] - kPositions);
      if (next[i] == (i == 0 ? start : 0)) continue;
      REQUIRE(read.positions.first == first);
      REQUIRE(read.positions.end == next[i]);
      for (int layer = 0; layer < 2; ++layer) {
        for (int64_t p = first; p < next[i]; ++p) {
          const absl::Span<const int32_t> list = read.Of(layer, p);
          REQUIRE(std::ssize(list) == p % 5);
          const kernels::UnitLists on_device = kept->ListOf(slot, layer, p);
          REQUIRE(on_device.counts[0] == p % 5);
          REQUIRE(on_device.units[0] == 1000 * slot + 10 * p + layer);
          if (!list.empty()) REQUIRE(list[0] == on_device.units[0]);
        }
      }
      kept->End(slot);
      REQUIRE_FALSE(kept->watched(slot));
    }
    kept->End(3);
    kept->End(1);
  }
}

TEST_CASE("policies say which caches they are for") {
  World world(false);
  PolicyOptions options;
  options.device = world.device.get();
  options.hbm = world.hbm.get();
  options.dram = world.dram.get();
  options.slots = 1;
  options.max_context = 64;
  options.heads = kHeads;
  options.max_rows = 8;
  options.latent_rank = kRank;
  options.architecture = "DeepseekV3ForCausalLM";
  options.name = "scout";
  const absl::Status refused = NewPolicy(options).status();
  CHECK(absl::IsInvalidArgument(refused));
  for (const char* word : {"scout", "DeepseekV3ForCausalLM", "full"}) {
    CHECK(std::string(refused.message()).find(word) != std::string::npos);
  }
  CHECK(OffloadingPolicies(Layout(false)).empty());
  options.name = "full";
  CHECK(NewPolicy(options).ok());
}

}  // namespace
}  // namespace sluice
