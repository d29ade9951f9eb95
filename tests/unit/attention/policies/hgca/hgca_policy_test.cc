#include "src/attention/policies/hgca/hgca_policy.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "kernels/kernel_table.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using kernels::GroupReduction;
using testing::PolicyRig;
using testing::RandomVectors;
using testing::RelativeError;
using Who = PolicyRig::Who;

// A GPU rounds the weights of V to bf16.
double ToleranceOf(const PolicyRig::Shape& shape) { return shape.kernels == "cuda" ? 1e-2 : 2e-3; }

// Steps of a comparison with a naive model, which takes most of the time under ThreadSanitizer.
constexpr int Steps(int count) {
#if defined(__SANITIZE_THREAD__)
  return count / 2;
#else
  return count;
#endif
}

std::unique_ptr<HgcaPolicy> MakePolicy(const PolicyOptions& options) {
  auto policy = NewHgcaPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

// Vectors with a few keys that many queries like, so that weights are uneven.
PolicyRig::Make Uneven(const PolicyRig::Shape& shape) {
  return [shape, random = RandomVectors(shape, 0)](uint64_t seed, int layer, int position) {
    PolicyRig::Vectors vectors = random(seed, layer, position);
    for (int head = 0; head < shape.heads; ++head) {
      float& first = vectors.q[static_cast<size_t>(head * shape.head_dim)];
      first = testing::RoundedToBf16(first + 3);
    }
    for (int head = 0; head < shape.kv_heads; ++head) {
      if ((position * 7 + head + layer) % 5 == 0) {
        vectors.k[static_cast<size_t>(head * shape.head_dim)] = 2;
      }
    }
    return vectors;
  };
}

// HGCA of one (sequence, layer, KV head) in float64: the window's moving averages, the tokens that
// they and A_cpu select, and the tokens that a row attends to.
class Model {
 public:
  Model(const PolicyRig::Shape& shape, const PolicyOptions::Hgca& hgca, PolicyRig::Make make,
        uint64_t seed, int layer, int kv_head)
      : shape_(shape),
        hgca_(hgca),
        make_(std::move(make)),
        seed_(seed),
        layer_(layer),
        kv_head_(kv_head) {}

  // An append that ends before row `first`: the moving average of its last `rows` rows' weights
  // over the tokens outside that row's window makes the selection.
  void Append(int first, int rows) {
    first_ = first;
    judged_ =
        std::max(0, first / shape_.block_tokens - hgca_.window_tokens / shape_.block_tokens + 1);
    const int size = judged_ * shape_.block_tokens;
    rows = std::min({rows, ContextualCache::JudgingRows(size), first - size + 1});
    Select(first - rows, first - 1, size);
  }
  // Returns the tokens that the row attends to, window included.
  std::set<int> Row(int position) {
    const int block = shape_.block_tokens, blocks = hgca_.window_tokens / block;
    const int outside = std::max(0, position / block - blocks + 1);
    if (first_ < 0) {
      first_ = position;
      judged_ = outside;
      std::set<int> all = Select(position, position, outside * block);
      Average(position, outside * block);
      cpu_ = static_cast<int64_t>(all.size());
      for (int t = outside * block; t <= position; ++t) all.insert(t);
      return all;
    }
    // The block that has just left counts whole until the next one leaves, and is then judged.
    for (; judged_ < outside - 1; ++judged_) {
      for (int t = judged_ * block; t < (judged_ + 1) * block; ++t) {
        double average = final_.at(t);
        if (t < first_) {
          const int rows = (judged_ + blocks) * block - first_;
          average /= 1 - std::pow(1 - double{hgca_.alpha}, rows);
        }
        final_[t] = average;
      }
      Mark(final_, judged_ * block, (judged_ + 1) * block, hgca_.window_tokens);
    }
    std::set<int> attended = selected_;
    for (int t = judged_ * block; t < outside * block; ++t) attended.insert(t);
    cpu_ = static_cast<int64_t>(attended.size());
    for (int t = outside * block; t <= position; ++t) attended.insert(t);
    Average(position, outside * block);
    return attended;
  }
  const std::set<int>& selected() const { return selected_; }
  int64_t cpu_tokens() const { return cpu_; }  // count of the last row

 private:
  // Selects by the moving average of A_cpu of rows [begin, position] over tokens [0, size). Returns
  // all of them.
  std::set<int> Select(int begin, int position, int size) {
    std::set<int> all;
    for (int t = 0; t < size; ++t) all.insert(t);
    std::map<int, double> average = Weights(begin, all);
    for (int row = begin + 1; row <= position; ++row) {
      for (const auto& [t, weight] : Weights(row, all)) {
        average[t] = (1 - double{hgca_.alpha}) * average[t] + double{hgca_.alpha} * weight;
      }
    }
    Mark(average, 0, size, size);
    return all;
  }
  // Selects the salient tokens of [begin, end) and what follows them in their blocks.
  void Mark(const std::map<int, double>& weights, int begin, int end, int size) {
    int follows = 0;
    for (int t = begin; t < end; ++t, --follows) {
      if (t % shape_.block_tokens == 0) follows = 0;
      if (hgca_.beta == 0 || weights.at(t) > hgca_.beta / size) follows = hgca_.following + 1;
      if (follows > 0) selected_.insert(t);
    }
  }
  // Returns the softmax over `tokens` of each query head of the group, reduced.
  std::map<int, double> Weights(int position, const std::set<int>& tokens) {
    const int group = shape_.heads / shape_.kv_heads, dim = shape_.head_dim;
    const std::vector<float> q = make_(seed_, layer_, position).q;
    std::map<int, double> out;
    for (int g = 0; g < group; ++g) {
      std::map<int, double> weights;
      double sum = 0;
      for (const int t : tokens) {
        const std::vector<float>& key = Key(t);
        double dot = 0;
        for (int d = 0; d < dim; ++d) {
          dot += double{q[static_cast<size_t>((kv_head_ * group + g) * dim + d)]} *
                 key[static_cast<size_t>(kv_head_ * dim + d)];
        }
        sum += weights[t] = std::exp(dot / std::sqrt(dim));
      }
      for (const auto& [t, weight] : weights) {
        if (hgca_.reduction == GroupReduction::kMax) {
          out[t] = std::max(out[t], weight / sum);
        } else {
          out[t] += weight / sum / group;
        }
      }
    }
    return out;
  }
  void Average(int position, int begin) {
    std::set<int> window;
    for (int t = begin; t <= position; ++t) window.insert(t);
    for (const auto& [t, weight] : Weights(position, window)) {
      double& average = final_[t];  // 0 if no row has attended to it
      average = t == position ? weight
                              : (1 - double{hgca_.alpha}) * average + double{hgca_.alpha} * weight;
    }
  }
  const std::vector<float>& Key(int token) {
    std::vector<float>& key = keys_[token];
    if (key.empty()) key = make_(seed_, layer_, token).k;
    return key;
  }

  const PolicyRig::Shape shape_;
  const PolicyOptions::Hgca hgca_;
  const PolicyRig::Make make_;
  const uint64_t seed_;
  const int layer_, kv_head_;
  int first_ = -1, judged_ = 0;
  int64_t cpu_ = 0;
  std::set<int> selected_;
  std::map<int, double> final_;
  std::map<int, std::vector<float>> keys_;
};

// The last `append` tokens are pending, and computed as rows of the prompt.
void CheckAgainstModel(const PolicyRig::Shape& shape, PolicyOptions::Hgca hgca, int context,
                       int steps, int append = 0) {
  const PolicyRig::Make make = Uneven(shape);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.workers = 2;
  options.worker_deadline = absl::Seconds(60);
  options.hgca = hgca;
  const auto policy = MakePolicy(options);
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 1, seed, context, context + steps, append);
  std::vector<std::vector<Model>> models;
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::vector<Model>& heads = models.emplace_back();
    for (int head = 0; head < shape.kv_heads; ++head) {
      heads.emplace_back(shape, hgca, make, seed, layer, head);
      if (append > 0) heads.back().Append(context, append);
    }
  }
  std::vector<int64_t> cpu(static_cast<size_t>(shape.layers));
  for (int step = 0; step < steps; ++step) {
    const int position = rig.position(1);
    const auto out = rig.Step(*policy, {1});
    for (int layer = 0; layer < shape.layers; ++layer) {
      INFO("step " << step << " position " << position << " layer " << layer);
      std::vector<std::set<int>> attended;
      for (Model& model : models[static_cast<size_t>(layer)]) {
        attended.push_back(model.Row(position));
        cpu[static_cast<size_t>(layer)] += model.cpu_tokens();
      }
      const auto want = rig.Naive(seed, layer, position, [&](int kv_head, int token) {
        return attended[static_cast<size_t>(kv_head)].contains(token) ? Who::kReal : Who::kNobody;
      });
      REQUIRE(RelativeError(out[static_cast<size_t>(layer)][0], want) <= ToleranceOf(shape));
    }
  }
  const PolicyStatistics statistics = policy->Statistics();
  int64_t selected = 0, judged = 0;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const PolicyStatistics::Layer& found = statistics.layers[static_cast<size_t>(layer)];
    CHECK(found.steps == steps);
    CHECK(found.missing == cpu[static_cast<size_t>(layer)]);
    CHECK(found.selected > found.missing);
    for (int head = 0; head < shape.kv_heads; ++head) {
      selected += policy->contextual_cache().SelectedTokens(1, layer, head);
      judged += policy->contextual_cache().JudgedTokens(1, layer, head);
    }
  }
  // The test needs a selection that takes some tokens and leaves some.
  if (hgca.beta > 0 && judged > 0) {
    CHECK(selected > judged / 20);
    CHECK(selected < judged * 19 / 20);
  }
  rig.Release(*policy, 1);
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
  CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
}

// HGCA's own options: nothing that follows a salient token is selected with it.
PolicyOptions::Hgca Paper() {
  PolicyOptions::Hgca hgca;
  hgca.beta = 1;
  hgca.following = 0;
  return hgca;
}

void NaiveModel(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  PolicyOptions::Hgca hgca = Paper();
  hgca.window_tokens = 3 * shape.block_tokens;
  CheckAgainstModel(shape, hgca, 130, Steps(150));
  hgca.alpha = 0.05f;
  hgca.reduction = GroupReduction::kMean;
  hgca.beta = 0.9f;
  CheckAgainstModel(shape, hgca, 7 * shape.block_tokens, Steps(100));
  shape.row_bucket = 3;  // recorded steps with padded rows
  shape.heads = 6;
  shape.kv_heads = 1;
  CheckAgainstModel(shape, hgca, 95, Steps(100));
  // Nothing is outside at first.
  CheckAgainstModel(shape, hgca, 5, Steps(120));
  hgca.beta = 2;
  hgca.following = 3;
  CheckAgainstModel(shape, hgca, 95, Steps(100), /*append=*/1);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "rows attend to what moving averages and first weights select, as a naive model says",
    NaiveModel)

void Appends(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  PolicyOptions::Hgca hgca = Paper();
  hgca.window_tokens = 3 * shape.block_tokens;
  // The contexts end at a block's end, where the first row pushes a block out, and inside one.
  for (const int context : {8 * shape.block_tokens, 7 * shape.block_tokens + 5, 5}) {
    for (const bool thread : {true, false}) {
      hgca.selection_thread = thread;
      CheckAgainstModel(shape, hgca, context, Steps(90), /*append=*/1);
    }
  }
  // Several rows judge together: fewer than are kept, and more.
  hgca.beta = 0.8f;
  for (const int append : {3, 8, 21}) {
    CheckAgainstModel(shape, hgca, 9 * shape.block_tokens + 3, Steps(40), append);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("pending tokens select anew, before the first decode row", Appends)

void WorkersSelect(const PolicyRig::Shape& shape) {
  PolicyOptions::Hgca hgca = Paper();
  hgca.window_tokens = shape.block_tokens;  // the smallest window
  hgca.selection_thread = false;
  CheckAgainstModel(shape, hgca, 100, Steps(90));
}
SLUICE_TEST_ON_CPU_AND_GPU("with the selection on the workers' own threads the same is selected",
                           WorkersSelect)

void BetaZero(const PolicyRig::Shape& shape) {
  PolicyRig rig(shape, RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.worker_deadline = absl::Seconds(60);
  options.hgca.window_tokens = 5 * shape.block_tokens;
  options.hgca.beta = 0;
  const auto policy = MakePolicy(options);
  const int context = 10 * shape.block_tokens;
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 0, seed, context, context + 200);
  for (int step = 0; step < Steps(200); ++step) {
    const auto out = rig.Step(*policy, {0});
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (const float lse :
           rig.Read(policy->parts_lse(layer), static_cast<size_t>(2 * shape.heads))) {
        REQUIRE(std::isfinite(lse));
      }
      const auto want = rig.Naive(seed, layer, context + step, [](int, int) { return Who::kReal; });
      REQUIRE(RelativeError(out[static_cast<size_t>(layer)][0], want) <= ToleranceOf(shape));
    }
  }
  for (const PolicyStatistics::Layer& layer : policy->Statistics().layers) {
    CHECK(layer.HitRate() > 0.2);
    CHECK(layer.HitRate() < 0.5);
  }
  rig.Release(*policy, 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("at beta 0 both sides together are exact attention", BetaZero)

using Rows = std::map<int, std::vector<std::vector<float>>>;  // by position: [layer][...]

void OwnBits(const PolicyRig::Shape& shape) {
  const uint64_t base = TestSeed();
  SplitMix64 random(base);
  const auto options_of = [&](PolicyRig& rig, int workers, bool thread) {
    PolicyOptions options = rig.Options();
    options.workers = workers;
    options.worker_deadline = absl::Seconds(60);
    options.dense_layers = 1;
    options.hgca.window_tokens = 2 * shape.block_tokens;
    options.hgca.selection_thread = thread;
    return options;
  };
  struct Life {
    int context = 0, total = 0;
    Rows rows;
  };
  std::map<uint64_t, Life> lives;
  {
    PolicyRig rig(shape, Uneven(shape));
    const auto policy = MakePolicy(options_of(rig, 2, true));
    std::map<int, uint64_t> slots;  // sequence in each slot
    uint64_t next = base;
    for (int step = 0; step < 400; ++step) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        if (!slots.contains(slot) && random.Below(8) == 0) {
          Life& life = lives[++next];
          life.context = static_cast<int>(1 + random.Below(200));
          life.total = life.context + static_cast<int>(1 + random.Below(80));
          rig.Admit(*policy, slot, next, life.context, life.total);
          slots[slot] = next;
        }
      }
      std::vector<int32_t> members;
      for (const auto& [slot, seed] : slots) {
        if (random.Below(4) > 0) members.push_back(slot);
      }
      if (members.empty()) continue;
      const auto out = rig.Step(*policy, members);
      for (size_t r = 0; r < members.size(); ++r) {
        const int slot = members[r];
        const uint64_t seed = slots[slot];
        const int position = rig.position(slot) - 1;
        for (const auto& layer : out) lives[seed].rows[position].push_back(layer[r]);
        REQUIRE(policy->SlotHealth(slot).ok());
        if (rig.position(slot) == lives[seed].total || random.Below(100) == 0) {
          rig.Release(*policy, slot);
          slots.erase(slot);
        }
      }
    }
    for (const auto& [slot, seed] : slots) rig.Release(*policy, slot);
    CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
    CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
  }
  REQUIRE(lives.size() > 10);
  PolicyRig rig(shape, Uneven(shape));
  const auto policy = MakePolicy(options_of(rig, 1, false));
  for (const auto& [seed, life] : lives) {
    rig.Admit(*policy, 0, seed, life.context, life.total);
    for (const auto& [position, rows] : life.rows) {
      INFO("sequence " << seed << " position " << position);
      REQUIRE(rig.position(0) == position);
      const auto out = rig.Step(*policy, {0});
      for (size_t layer = 0; layer < out.size(); ++layer) REQUIRE(out[layer][0] == rows[layer]);
    }
    rig.Release(*policy, 0);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "whoever comes and goes, a sequence's rows have the bits that they have alone", OwnBits)

void FailingWorker(const PolicyRig::Shape& shape) {
  const uint64_t seed = TestSeed();
  const auto run = [&](const char* fault) {
    PolicyRig rig(shape, Uneven(shape));
    PolicyOptions options = rig.Options();
    options.workers = 2;
    options.worker_deadline = absl::Seconds(60);
    options.hgca.window_tokens = 2 * shape.block_tokens;
    const auto policy = MakePolicy(options);
    std::vector<int32_t> slots;
    for (int slot = 0; slot < shape.slots; ++slot) {
      rig.Admit(*policy, slot, seed + static_cast<uint64_t>(slot), 100 + slot, 200);
      slots.push_back(slot);
    }
    rig.Step(*policy, slots);
    std::map<int, std::vector<std::vector<float>>> rows;  // rows of healthy sequences
    {
      std::optional<ScopedFailpoints> armed;
      if (fault != nullptr) armed.emplace(fault);
      for (int step = 0; step < 20; ++step) {
        const auto out = rig.Step(*policy, slots);
        for (const auto& layer : out) {
          for (size_t r = 0; r < slots.size(); ++r) rows[slots[r]].push_back(layer[r]);
        }
      }
    }
    for (const int slot : slots) {
      const absl::Status health = policy->SlotHealth(slot);
      if (!health.ok()) {
        CHECK(health.code() == absl::StatusCode::kInternal);
        rows.erase(slot);
      }
      rig.Release(*policy, slot);
    }
    // The next sequence in a slot is served.
    rig.Admit(*policy, 0, seed + 9, 120, 150);
    rig.Step(*policy, {0});
    CHECK(policy->SlotHealth(0).ok());
    rig.Release(*policy, 0);
    return rows;
  };
  const auto well = run(nullptr);
  CHECK(std::ssize(well) == shape.slots);
  const auto left = run("attention.worker=error*1");
  CHECK(left.size() < well.size());
  CHECK_FALSE(left.empty());
  for (const auto& [slot, rows] : left) CHECK(rows == well.at(slot));
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a worker that fails ends the sequences of its group, and the others keep their bits",
    FailingWorker)

// Makes a worker's kernel wait at one position until it may go on.
std::atomic<int> waits_at{-1};
std::atomic<bool> waits{false};
void (*real_kernel)(const kernels::SparseAttentionParams&, kernels::Worker) = nullptr;
void WaitingKernel(const kernels::SparseAttentionParams& p, kernels::Worker worker) {
  if (p.positions[0] == waits_at.load()) {
    waits = true;
    while (waits_at.load() >= 0) std::this_thread::yield();
  }
  real_kernel(p, worker);
}

void LateWorker(const PolicyRig::Shape& shape) {
  const uint64_t seed = TestSeed();
  kernels::KernelTable table = *kernels::FindKernelTable("portable");
  real_kernel = table.sparse_attention;
  table.sparse_attention = WaitingKernel;
  PolicyRig rig(shape, Uneven(shape));
  PolicyOptions options = rig.Options();
  options.workers = 2;
  options.worker_deadline = absl::Seconds(1);
  options.hgca.window_tokens = 2 * shape.block_tokens;
  options.host_kernels = &table;
  const auto policy = MakePolicy(options);
  // because the policy's destructor waits for the worker
  const absl::Cleanup wake = [] { waits_at = -1; };
  for (int slot = 0; slot < 2; ++slot) {
    rig.Admit(*policy, slot, seed + static_cast<uint64_t>(slot), 100 + 7 * slot, 200);
  }
  waits_at = rig.position(0);
  rig.Step(*policy, {0, 1});
  CHECK(waits.load());
  CHECK(absl::IsInternal(policy->SlotHealth(0)));
  CHECK_FALSE(policy->Warm(0));
  CHECK_FALSE(policy->WarmEvent(0).Ready());
  CHECK(policy->Warm(1));
  std::thread wakes([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    waits_at = -1;
  });
  policy->WarmEvent(0).Wait();
  CHECK(waits_at.load() == -1);
  wakes.join();
  rig.Release(*policy, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it has polled
  rig.Admit(*policy, 0, seed + 9, 120, 150);
  rig.Step(*policy, {0});
  CHECK(policy->SlotHealth(0).ok());
  rig.Release(*policy, 0);
  rig.Release(*policy, 1);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a slot is released when a late worker has come back, and serves the next sequence", LateWorker)

TEST_CASE("an option that is out of range is named") {
  PolicyRig rig(PolicyRig::Shape{}, RandomVectors(PolicyRig::Shape{}, 0));
  const auto refused = [&](auto change) {
    PolicyOptions options = rig.Options();
    options.hgca.window_tokens = 32;
    change(options.hgca);
    const absl::Status status = NewHgcaPolicy(options).status();
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  using Hgca = PolicyOptions::Hgca;
  CHECK_THAT(refused([](Hgca& h) { h.window_tokens = 40; }), Catch::Contains("window_tokens"));
  CHECK_THAT(refused([](Hgca& h) { h.window_tokens = 0; }), Catch::Contains("window_tokens"));
  CHECK_THAT(refused([](Hgca& h) { h.beta = -1; }), Catch::Contains("beta"));
  CHECK_THAT(refused([](Hgca& h) { h.beta = NAN; }), Catch::Contains("beta"));
  CHECK_THAT(refused([](Hgca& h) { h.betas = {1, 1}; }), Catch::Contains("betas"));
  CHECK_THAT(refused([](Hgca& h) { h.following = -1; }), Catch::Contains("following"));
  CHECK_THAT(refused([](Hgca& h) { h.alpha = 0; }), Catch::Contains("alpha"));
  CHECK_THAT(refused([](Hgca& h) { h.alpha = 1.5f; }), Catch::Contains("alpha"));
  CHECK_THAT(refused([](Hgca& h) { h.reduction = GroupReduction::kSoftmaxSum; }),
             Catch::Contains("reduction"));
}

}  // namespace
}  // namespace sluice
