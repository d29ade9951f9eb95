#include "src/attention/policies/hgca/contextual_cache.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "src/attention/policies/hgca/selection_thread.h"
#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "src/kv/page_pool.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 2, kKvHeads = 2, kGroup = 3, kHeads = kKvHeads * kGroup;
constexpr int kDim = 16, kBlock = 16, kWindowBlocks = 2, kSlots = 2, kWorkers = 2,
              kMaxContext = 2048;
constexpr size_t kArenaBytes = 8 << 20;
constexpr float kScale = 0.25f;
constexpr double kNever = -std::numeric_limits<double>::infinity();

using Row = std::vector<float>;

// The CPU's part of a row: o [heads][head_dim], lse [heads].
struct Partial {
  Row o = Row(kHeads * kDim), lse = Row(kHeads);
  bool operator==(const Partial&) const = default;
};

// The cache, its tiers, and a model of one sequence that keeps what was selected as positions.
class Bench {
 public:
  explicit Bench(float beta, kernels::GroupReduction reduction = kernels::GroupReduction::kMax,
                 const char* kernels = "reference", std::vector<float> betas = {}) {
    CacheKind kv;
    kv.name = "kv";
    kv.element_type = kernels::DType::kFloat32;
    kv.heads = kKvHeads;
    kv.block_tokens = kBlock;
    kv.SetEqualParts(2, 2 * kDim * 4);
    const CacheLayout layout{kLayers, {kv}};
    device_ = *NewCpuDevice({"portable", 1});
    dram_ =
        *PagePool::Create("dram", layout, *device_->Allocate(MemoryKind::kPinned, kArenaBytes, ""));
    options_.device = device_.get();
    options_.kernels = kernels::FindKernelTable(kernels);
    options_.layout = layout;
    options_.slots = kSlots;
    options_.heads = kHeads;
    options_.workers = kWorkers;
    options_.max_context = kMaxContext;
    options_.arena = dram_->base(0);
    options_.window = {kBlock, kWindowBlocks};
    options_.beta = beta;
    options_.betas = std::move(betas);
    options_.alpha = 0.3f;
    options_.patience = absl::Seconds(60);  // so that a busy machine is no fault
    options_.reduction = reduction;
    cache_ = *ContextualCache::Create(options_);
    ready_ = device_->NewEvent();
  }

  // Makes a sequence of `total` tokens whose keys and values are all there from the start; tokens
  // past a row's position are never outside its window.
  void Join(int slot, int64_t total, uint64_t seed) {
    SplitMix64 random(seed);
    const int64_t tokens = (total + kBlock - 1) / kBlock * kBlock;
    auto home = std::make_unique<SequenceCache>(dram_.get(), dram_->TryReserve(tokens));
    home->EnsureTokens(tokens);
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int64_t block = 0; block * kBlock < tokens; ++block) {
          auto* at = reinterpret_cast<float*>(home->BlockAddress(layer, 0, head, block));
          const bool own = block * kBlock < total;
          for (int i = 0; i < 2 * kBlock * kDim; ++i) {
            at[i] = own ? static_cast<float>(4 * random.Uniform() - 2)
                        : std::numeric_limits<float>::quiet_NaN();
          }
        }
      }
    }
    homes_[slot] = std::move(home);
    cache_->Join(slot, *homes_[slot]);
    cache_->Append(slot);
    first_[slot] = -1;
  }
  void Append(int slot) {
    cache_->Append(slot);
    first_[slot] = -1;
  }
  void Leave(int slot) {
    cache_->Leave(slot);
    homes_.erase(slot);
  }
  // Returns all bytes of the host caches' arena, free pages included.
  std::string Memory() const {
    return {reinterpret_cast<const char*>(dram_->base(0)), kArenaBytes};
  }

  // Attends with the row at `position`, its work cut into tasks at `cut`. Averages of evicted
  // blocks come from the seed.
  Partial Attend(int slot, int layer, int64_t position, uint64_t seed, int cut) {
    if (layer == 0 && position % kBlock == 0 && Outside(position) > 0) Evict(slot, position, seed);
    const Row q = Query(layer, position, seed);
    Partial out;
    std::fill(out.o.begin(), out.o.end(), std::numeric_limits<float>::quiet_NaN());
    CoAttention::Task task;
    task.channel = layer;
    task.slot = slot;
    task.position = static_cast<int>(position);
    task.q = q.data();
    task.scale = kScale;
    task.o = out.o.data();
    task.lse = out.lse.data();
    for (const auto& [begin, end] : {std::pair{0, cut}, std::pair{cut, kKvHeads}}) {
      if (begin == end) continue;
      task.head_begin = begin;
      task.head_end = end;
      REQUIRE(cache_->Attend(begin == 0 ? 0 : 1, task, [] { return true; }).ok());
    }
    return out;
  }

  // Does the same with the model, which also selects. REQUIRES: called for every row, in order.
  Partial Expected(int slot, int layer, int64_t position, uint64_t seed) {
    Partial out;
    const Row q = Query(layer, position, seed);
    const int64_t outside = Outside(position);
    if (layer == 0 && first_[slot] < 0) first_[slot] = position;
    const bool evaluates = first_[slot] == position;
    for (int head = 0; head < kKvHeads; ++head) {
      std::set<int64_t>& set = selected_[{slot, layer, head}];
      std::set<int64_t> attended;
      if (evaluates) {
        for (int64_t t = 0; t < outside * kBlock; ++t) attended.insert(t);
      } else {
        // Everything before the newest block outside is judged; that block counts whole until the
        // next comes.
        for (int64_t b = Outside(first_[slot]); b < outside - 1; ++b) Judge(slot, layer, head, b);
        attended = set;
        const int64_t pending = std::max(Outside(first_[slot]), outside - 1);
        for (int64_t t = pending * kBlock; t < outside * kBlock; ++t) attended.insert(t);
      }
      std::map<int64_t, double> reduced;
      for (int g = 0; g < kGroup; ++g) {
        const int h = head * kGroup + g;
        std::map<int64_t, double> scores;
        double largest = kNever, sum = 0;
        for (const int64_t t : attended) {
          double dot = 0;
          for (int d = 0; d < kDim; ++d) {
            dot += double{q[static_cast<size_t>(h * kDim + d)]} * Key(slot, layer, head, t)[d];
          }
          largest = std::max(largest, scores[t] = dot * double{kScale});
        }
        for (auto& [t, score] : scores) sum += score = std::exp(score - largest);
        for (const auto& [t, score] : scores) {
          for (int d = 0; d < kDim; ++d) {
            out.o[static_cast<size_t>(h * kDim + d)] +=
                static_cast<float>(score / sum * Key(slot, layer, head, t)[kBlock * kDim + d]);
          }
          double& weight = reduced[t];
          const double share = score / sum;
          weight = options_.reduction == kernels::GroupReduction::kMax ? std::max(weight, share)
                                                                       : weight + share / kGroup;
        }
        out.lse[static_cast<size_t>(h)] = static_cast<float>(largest + std::log(sum));
      }
      if (!evaluates) continue;
      set.clear();
      for (const auto& [t, weight] : reduced) {
        if (Salient(layer, head, weight, outside * kBlock)) set.insert(t);
      }
      judged_[{slot, layer, head}] = outside;
    }
    return out;
  }

  // Compares both; then compares the selection, if no thread selects meanwhile.
  void CheckRow(int slot, int64_t position, uint64_t seed) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const Partial found = Attend(slot, layer, position, seed, static_cast<int>(seed % 3));
      const Partial expected = Expected(slot, layer, position, seed);
      for (size_t i = 0; i < found.o.size(); ++i) {
        INFO("position " << position << ", layer " << layer << ", element " << i);
        REQUIRE(found.o[i] == Approx(expected.o[i]).margin(2e-5));
      }
      for (size_t h = 0; h < found.lse.size(); ++h) {
        REQUIRE(std::isfinite(found.lse[h]) == std::isfinite(expected.lse[h]));
        if (std::isfinite(found.lse[h])) REQUIRE(found.lse[h] == Approx(expected.lse[h]));
      }
    }
  }
  // Checks that the selected tokens are those of the model.
  void CheckSelected(int slot) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int64_t b = judged_[{slot, layer, head}];
             b * kBlock < cache_->JudgedTokens(slot, layer, head); ++b) {
          Judge(slot, layer, head, b);
        }
        const std::set<int64_t>& set = selected_[{slot, layer, head}];
        REQUIRE(cache_->SelectedTokens(slot, layer, head) == static_cast<int64_t>(set.size()));
        const std::vector<int32_t> found = cache_->Selected(slot, layer, head);
        REQUIRE(std::vector<int64_t>(found.begin(), found.end()) ==
                std::vector<int64_t>(set.begin(), set.end()));
      }
    }
  }
  const std::set<int64_t>& selected(int slot, int layer, int head) {
    return selected_[{slot, layer, head}];
  }
  ContextualCache& cache() { return *cache_; }
  int64_t Outside(int64_t position) const { return options_.window.BlocksOutside(position); }

 private:
  using Where = std::tuple<int, int, int>;  // slot, layer, head

  const float* Key(int slot, int layer, int head, int64_t token) {
    return reinterpret_cast<const float*>(
               homes_[slot]->BlockAddress(layer, 0, head, token / kBlock)) +
           token % kBlock * kDim;
  }
  Row Query(int layer, int64_t position, uint64_t seed) const {
    SplitMix64 random(seed * 1000003 + static_cast<uint64_t>(position * kLayers + layer));
    Row q(kHeads * kDim);
    for (float& x : q) x = static_cast<float>(4 * random.Uniform() - 2);
    return q;
  }
  // Writes averages around the threshold for the block that leaves before `position`.
  void Evict(int slot, int64_t position, uint64_t seed) {
    const int64_t block = Outside(position) - 1;
    for (int layer = 0; layer < kLayers; ++layer) {
      SplitMix64 random(seed * 7919 + static_cast<uint64_t>(block * kLayers + layer));
      float* const averages = cache_->Averages(slot, layer, block);
      for (int i = 0; i < kKvHeads * kBlock; ++i) {
        averages[i] = static_cast<float>(random.Uniform() * 2 * options_.beta /
                                         static_cast<double>(options_.window.tokens()));
        averages_[{slot, layer, i / kBlock}][block * kBlock + i % kBlock] = averages[i];
      }
    }
    cache_->Evict(slot, block + 1, ready_.get());
  }
  void Judge(int slot, int layer, int head, int64_t block) {
    int64_t& judged = judged_[{slot, layer, head}];
    if (block < judged) return;
    REQUIRE(block == judged);
    for (int64_t t = block * kBlock; t < (block + 1) * kBlock; ++t) {
      double average = averages_[{slot, layer, head}].at(t);
      if (t < first_[slot]) {
        // Rows first .. (block + window) * kBlock - 1 have seen it, counted from 0.
        const auto rows = static_cast<double>((block + kWindowBlocks) * kBlock - first_[slot]);
        average /= 1 - std::pow(1 - double{options_.alpha}, rows);
      }
      if (Salient(layer, head, average, options_.window.tokens()))
        selected_[{slot, layer, head}].insert(t);
    }
    ++judged;
  }
  bool Salient(int layer, int head, double weight, int64_t size) const {
    const size_t list = static_cast<size_t>(layer * kKvHeads + head);
    const float beta = options_.betas.empty() ? options_.beta : options_.betas[list];
    if (beta == 0) return true;
    const double limit = double{beta} / static_cast<double>(size);
    // Weights so close to the limit that rounding decides are drawn once in a million.
    REQUIRE(std::abs(weight - limit) > 1e-7 * limit);
    return weight > limit;
  }

  ContextualCache::Options options_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<Event> ready_;
  std::map<int, std::unique_ptr<SequenceCache>> homes_;
  std::map<int, int64_t> first_;
  std::map<Where, std::set<int64_t>> selected_;
  std::map<Where, int64_t> judged_;
  std::map<Where, std::map<int64_t, double>> averages_;
  std::unique_ptr<ContextualCache> cache_;
};

TEST_CASE("rows attend to all, then to what their weights and the averages select") {
  const auto reduction = GENERATE(kernels::GroupReduction::kMax, kernels::GroupReduction::kMean);
  const uint64_t seed = TestSeed();
  Bench bench(1.0f, reduction);
  for (const int64_t context : {1, 31, 32, 33, 47, 48, 100, 200}) {
    bench.Join(0, context + 90, seed + static_cast<uint64_t>(context));
    for (int64_t position = context; position < context + 90; ++position) {
      bench.CheckRow(0, position, seed);
    }
    bench.CheckSelected(0);
    const int64_t selected = bench.cache().SelectedTokens(0, 1, 1);
    CHECK(selected > 0);
    CHECK(selected < bench.cache().JudgedTokens(0, 1, 1));
    bench.Leave(0);
  }
}

TEST_CASE("each layer and KV head selects by its own beta") {
  const uint64_t seed = TestSeed();
  Bench bench(1.0f, kernels::GroupReduction::kMax, "portable", {0.0f, 1.0f, 100.0f, 0.7f});
  bench.Join(0, 290, seed);
  for (int64_t position = 200; position < 290; ++position) bench.CheckRow(0, position, seed);
  bench.CheckSelected(0);
  CHECK(bench.cache().SelectedTokens(0, 0, 0) == bench.cache().JudgedTokens(0, 0, 0));
  CHECK(bench.cache().SelectedTokens(0, 0, 1) < bench.cache().JudgedTokens(0, 0, 1));
  CHECK(bench.cache().SelectedTokens(0, 1, 0) == 0);
}

// Returns the tokens of the lists of a row by ListTokens.
std::vector<int32_t> ListTokens(Bench& bench, int layer, int64_t position) {
  std::vector<int32_t> tokens(kKvHeads);
  bench.cache().ListTokens(layer, 0, static_cast<int32_t>(position), tokens.data());
  return tokens;
}

TEST_CASE("workers are told what lists hold, and nothing else while a row's round is open") {
  const uint64_t seed = TestSeed();
  Bench bench(1.0f, kernels::GroupReduction::kMax, "portable");
  bench.Join(0, 500, seed);
  using Told = std::vector<std::vector<int32_t>>;  // [layers][kv_heads]
  const auto told = [&](int64_t position) {
    return Told{ListTokens(bench, 0, position), ListTokens(bench, 1, position)};
  };
  const auto all = [&](int64_t position) {
    return Told(kLayers, std::vector<int32_t>(
                             kKvHeads, static_cast<int32_t>(bench.Outside(position) * kBlock)));
  };
  CHECK(told(250) == all(250));  // not announced
  // A row's lists are counted when it is announced, two rows ahead, if another block is outside
  // then or no list had been selected before: what is selected, and the tokens not yet judged.
  std::map<int64_t, Told> expected;
  bool selected = false;
  const auto announce = [&](int64_t position) {
    if (selected && bench.Outside(position) == bench.Outside(position - 1)) {
      expected[position] = expected[position - 1];
    } else {
      expected[position] = all(position);
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int head = 0; head < kKvHeads; ++head) {
          const int64_t judged = bench.cache().JudgedTokens(0, layer, head);
          expected[position][static_cast<size_t>(layer)][static_cast<size_t>(head)] +=
              static_cast<int32_t>(bench.cache().SelectedTokens(0, layer, head) - judged);
          selected = judged > 0;
        }
      }
    }
    bench.cache().Announce(0, static_cast<int32_t>(position));
  };
  announce(250);
  announce(251);
  for (int64_t position = 250; position < 420; ++position) {
    INFO("position " << position);
    REQUIRE(told(position) == expected[position]);
    if (position == 250) REQUIRE(told(position) == all(position));
    if (position > 254) REQUIRE(told(position)[0][0] < all(position)[0][0]);
    bench.CheckRow(0, position, seed);
    bench.cache().SelectAhead();
    announce(position + 2);
    REQUIRE(told(position) == expected[position]);
  }
  bench.Append(0);
  selected = false;
  announce(440);
  CHECK(told(440) == all(440));
}

TEST_CASE("at beta 0 every token that leaves the window is selected") {
  Bench bench(0.0f);
  bench.Join(0, 260, TestSeed());
  for (int64_t position = 70; position < 260; ++position) bench.CheckRow(0, position, 3);
  for (int head = 0; head < kKvHeads; ++head) {
    CHECK(bench.cache().JudgedTokens(0, 0, head) == (bench.Outside(259) - 1) * kBlock);
    CHECK(bench.cache().SelectedTokens(0, 0, head) == bench.cache().JudgedTokens(0, 0, head));
  }
  const ContextualCache::Counters counters = bench.cache().LayerCounters(0);
  CHECK(counters.rows == 190);
  CHECK(counters.cpu_tokens == counters.outside_tokens);
  int64_t tokens = 0;
  for (int64_t position = 70; position < 260; ++position) tokens += (position + 1) * kKvHeads;
  CHECK(counters.cpu_tokens + counters.window_tokens == tokens);
}

TEST_CASE("an append selects anew from all that is outside: tokens come back, others go") {
  const uint64_t seed = TestSeed();
  Bench bench(1.0f);
  bench.Join(0, 400, seed);
  for (int64_t position = 150; position < 200; ++position) bench.CheckRow(0, position, seed);
  bench.CheckSelected(0);
  const std::set<int64_t> before = bench.selected(0, 1, 0);
  bench.Append(0);  // 60 tokens, with other queries
  for (int64_t position = 260; position < 262; ++position) bench.CheckRow(0, position, seed + 1);
  bench.CheckSelected(0);
  const std::set<int64_t> after = bench.selected(0, 1, 0);
  std::set<int64_t> gone, back;
  for (const int64_t t : before) {
    if (after.count(t) == 0) gone.insert(t);
  }
  for (const int64_t t : after) {
    if (before.count(t) == 0 && t < 150 - kWindowBlocks * kBlock) back.insert(t);
  }
  CHECK_FALSE(gone.empty());
  CHECK_FALSE(back.empty());
  CHECK(bench.cache().JudgedTokens(0, 1, 0) == bench.Outside(260) * kBlock);
  for (int64_t position = 262; position < 400; ++position) bench.CheckRow(0, position, seed + 1);
  bench.CheckSelected(0);
}

// Runs two sequences side by side, with or without the thread, heads cut into tasks or not.
std::vector<Partial> Run(const char* kernels, bool thread, int cut, uint64_t seed) {
  Bench bench(1.0f, kernels::GroupReduction::kMax, kernels);
  std::optional<SelectionThread> selects;
  if (thread) selects.emplace(&bench.cache());
  std::vector<Partial> rows;
  for (int round = 0; round < 3; ++round) {
    bench.Join(0, 400, seed);
    bench.Join(1, 300, seed + 1);
    for (int64_t step = 0; step < 90; ++step) {
      for (int layer = 0; layer < kLayers; ++layer) {
        rows.push_back(bench.Attend(0, layer, 250 + step, seed, cut));
        rows.push_back(bench.Attend(1, layer, 60 + step, seed, cut));
      }
    }
    bench.Leave(round % 2);
    bench.Leave(1 - round % 2);
  }
  return rows;
}

TEST_CASE("no bit depends on who selects, or on how heads are cut into tasks") {
  const uint64_t seed = TestSeed();
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    if (table->sparse_attention == nullptr) continue;
    const std::vector<Partial> alone = Run(table->name, false, 0, seed);
    CHECK(alone == Run(table->name, true, 0, seed));
    CHECK(alone == Run(table->name, true, 1, seed));
    CHECK(alone == Run(table->name, false, 1, seed));
  }
}

TEST_CASE("a sequence may leave while its selection is being made") {
  const uint64_t seed = TestSeed();
  Bench bench(1.0f, kernels::GroupReduction::kMax, "portable");
  SelectionThread thread(&bench.cache());
  for (int round = 0; round < 60; ++round) {
    bench.Join(0, 2000, seed);
    for (int layer = 0; layer < kLayers; ++layer) bench.Attend(0, layer, 1900, seed, 1);
    bench.Leave(0);
    const std::string given_back = bench.Memory();
    bench.cache().Wake();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        REQUIRE(bench.cache().JudgedTokens(0, layer, head) == 0);
      }
    }
    // Nothing is written to the pages that the sequence gave back.
    REQUIRE(bench.Memory() == given_back);
  }
}

TEST_CASE("a worker that is too late writes nothing, and nothing is selected by its row") {
  Bench bench(1.0f);
  bench.Join(0, 200, 1);
  const Row q(kHeads * kDim);
  Partial out;
  const Partial untouched = out;
  CoAttention::Task task;
  task.position = 150;
  task.head_end = kKvHeads;
  task.q = q.data();
  task.o = out.o.data();
  task.lse = out.lse.data();
  for (int asked = 0; asked < 2; ++asked) {
    int asks = asked;
    CHECK(bench.cache().Attend(0, task, [&] { return asks-- > 0; }).ok());
    CHECK(out == untouched);
  }
  CHECK_FALSE(bench.cache().SelectAhead());
  CHECK(bench.cache().JudgedTokens(0, 0, 0) == 0);
  CHECK(bench.cache().LayerCounters(0).rows == 0);
}

}  // namespace
}  // namespace sluice
