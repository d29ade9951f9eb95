// Ranks of experts on simulated devices: every command and every exchange takes a time of its own,
// drawn from a seed, branches go in any order, and the result is the same bits. One thread runs all
// ranks, so each step is enqueued on every rank before any is waited for.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/attention/policy_factory.h"
#include "src/attention/policy_options.h"
#include "src/base/error.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"
#include "src/device/sim/sim_ranks.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/model/policy_model.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kSlots = 5;
constexpr int kMaxRows = 512;
constexpr int kMaxContext = 256;
constexpr int kSteps = 3;  // of decode rows
constexpr size_t kPoolBytes = size_t{32} << 20;

using Choose = void (*)(PolicyOptions&);

// A model, its policy and a batch on a device, whose steps are enqueued and waited for apart.
class Batch {
 public:
  Batch(std::unique_ptr<Device> device, Model::Options options, const Choose& choose)
      : device_(std::move(device)) {
    options.directory = fixtures::ModelDir("tiny-deepseek-v32");
    options.kv_dtype = DType::kFloat32;
    options.max_context = kMaxContext;
    options.max_rows = kMaxRows;
    options.max_logits = kSlots;
    model_ = OrFail(Model::Load(options, device_.get()));
    Place(choose);
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
    done_ = device_->NewEvent();
    const auto words = [this](int64_t count) {
      return OrFail(device_->Allocate(MemoryKind::kPinned, size_t(count) * 4, "a test"));
    };
    tokens_ = words(kSlots * kMaxContext);
    rows_ = words(3 * kMaxRows + kSlots);
    logits_ = words(int64_t{kSlots} * model_->config().vocab_size);
  }
  ~Batch() {
    for (size_t slot = 0; slot < lengths_.size(); ++slot) policy_->Release(static_cast<int>(slot));
    stream_.reset();
  }

  // Begins sequences, one a slot: prompts, and the tokens that are dictated behind them.
  void Begin(const std::vector<std::vector<int32_t>>& sequences) {
    for (size_t slot = 0; slot < sequences.size(); ++slot) {
      std::unique_ptr<SequenceCache> home;
      const auto total = static_cast<int64_t>(sequences[slot].size());
      REQUIRE(policy_->Admit(static_cast<int>(slot), 0, total, Promise::kFirm, home));
      std::copy(sequences[slot].begin(), sequences[slot].end(),
                tokens_.as<int32_t>() + slot * kMaxContext);
      lengths_.push_back(static_cast<int>(total) - kSteps);
      policy_->BeginPrompt(static_cast<int>(slot), total - kSteps, 0);
      AwaitWarm(static_cast<int>(slot));
    }
  }
  void EndPrompts() {
    for (size_t slot = 0; slot < lengths_.size(); ++slot) {
      policy_->EndPrompt(static_cast<int>(slot), lengths_[slot], {});
      AwaitWarm(static_cast<int>(slot));
    }
  }
  int rows(int step) const {
    if (step > 0) return std::max<int>(1, static_cast<int>(lengths_.size()));
    int all = 0;
    for (const int length : lengths_) all += length;
    return std::max(1, all);
  }
  // Enqueues step 0, of all prompts, or a step of one row a sequence.
  void Enqueue(int step, int most_rows, bool halves) {
    auto* const slots = rows_.as<int32_t>();
    int32_t *const positions = slots + kMaxRows, *const numbers = positions + kMaxRows;
    int32_t* const wanted = numbers + kMaxRows;
    int row = 0;
    for (size_t slot = 0; slot < lengths_.size(); ++slot) {
      const int begin = step == 0 ? 0 : lengths_[slot] + step - 1;
      const int end = step == 0 ? lengths_[slot] : begin + 1;
      policy_->Grow(static_cast<int>(slot), end);
      for (int position = begin; position < end; ++position, ++row) {
        slots[row] = static_cast<int32_t>(slot);
        positions[row] = position;
        numbers[row] = step == 0 ? 0 : step - 1;
      }
      wanted[slot] = row - 1;
    }
    policy_->BeginStep(*stream_, {slots, size_t(row)}, {positions, size_t(row)});
    if (row == 0) {
      slots[0] = -1;
      positions[0] = numbers[0] = 0;
    }
    StepInputs in;
    in.tokens = tokens_.as<int32_t>();
    in.token_stride = kMaxContext;
    in.slots = slots;
    in.positions = positions;
    in.numbers = numbers;
    in.rows = std::max(row, 1);
    in.decode_rows = step == 0 && row > 0 ? 0 : in.rows;
    in.logit_rows = wanted;
    in.logit_count = static_cast<int32_t>(lengths_.size());
    in.logits = logits_.as<float>();
    in.most_rows = most_rows;
    in.halves = halves;
    model_->Forward(*stream_, in, *policy_);
    stream_->Record(*done_);
  }
  // Waits for the step, and adds its logits to the answer.
  void Finish() {
    done_->Wait();
    const auto* const from = logits_.as<float>();
    answer_.insert(answer_.end(), from,
                   from + lengths_.size() * static_cast<size_t>(model_->config().vocab_size));
  }

  Device& device() { return *device_; }
  const std::vector<float>& answer() const { return answer_; }

 private:
  void Place(const Choose& choose) {
    PolicyOptions options;
    DescribeModel(*model_, &options);
    options.slots = kSlots;
    options.hbm_bytes = options.dram_bytes = kPoolBytes;
    choose(options);
    const TierShapes shapes = TierShapesOf(options, model_->cache_layout());
    const auto pool = [this](const char* name, const TierShape& shape, MemoryKind kind) {
      return OrFail(
          PagePool::Create(name, shape, OrFail(device_->Allocate(kind, kPoolBytes, "a test"))));
    };
    hbm_ = pool("hbm", shapes.hbm, MemoryKind::kDevice);
    dram_ = pool("dram", shapes.dram, MemoryKind::kPinned);
    options.device = device_.get();
    options.hbm = hbm_.get();
    options.dram = dram_.get();
    policy_ = OrFail(NewPolicy(options));
  }
  void AwaitWarm(int slot) {
    while (!policy_->Warm(slot)) policy_->WarmEvent(slot).Wait();
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  Buffer tokens_, rows_, logits_;
  std::vector<int> lengths_;  // of prompts, by slot
  std::vector<float> answer_;
};

// The sequences of each rank: three, two, and none. Prompts are longer than what a row selects.
std::vector<std::vector<std::vector<int32_t>>> SequencesOf(int ranks) {
  std::vector<std::vector<std::vector<int32_t>>> all(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks && rank < 2; ++rank) {
    for (int i = 0; i < 3 - rank; ++i) {
      std::vector<int32_t> tokens;
      for (int t = 0; t < 70 + 9 * i + 4 * rank + kSteps; ++t) {
        tokens.push_back((t * 7919 + 31 * i + 17 * rank + 3) % 500);
      }
      all[static_cast<size_t>(rank)].push_back(std::move(tokens));
    }
  }
  return all;
}

void RunSteps(const std::vector<Batch*>& batches, bool halves) {
  for (int step = 0; step <= kSteps; ++step) {
    if (step == 1) {
      for (Batch* batch : batches) batch->EndPrompts();
    }
    int most = 1;
    for (const Batch* batch : batches) most = std::max(most, batch->rows(step));
    for (Batch* batch : batches) batch->Enqueue(step, most, halves && step > 0);
    for (Batch* batch : batches) batch->Finish();
  }
}

std::vector<float> AnswerAlone(const std::vector<std::vector<int32_t>>& sequences,
                               const Choose& choose) {
  Batch batch(OrFail(testing::TestDevice("portable")), {}, choose);
  batch.Begin(sequences);
  RunSteps({&batch}, /*halves=*/false);
  return batch.answer();
}

// Simulated ranks of experts, with their batches.
class SimBatches {
 public:
  SimBatches(SimRanksOptions options, const Choose& choose, bool halves)
      : ranks_(options, &clock_) {
    RankGroupOptions own;
    own.size = options.size;
    own.name = "sim";
    own.deadline = absl::Seconds(2);
    for (own.rank = 0; own.rank < own.size; ++own.rank) {
      SimDeviceOptions of;
      of.kernels = kernels::FindKernelTable("portable");
      of.seed = options.seed + static_cast<uint64_t>(own.rank);
      of.stall_share = 0.01;
      of.stall = absl::Milliseconds(5);
      of.ranks = &ranks_;
      auto device = NewSimDevice(of, &clock_);
      groups_.push_back(OrFail(device->JoinRanks(own)));
      Model::Options model;
      model.expert_parallel = own.size;
      model.rank = own.rank;
      model.ranks = groups_.back().get();
      model.halves = halves;
      batches_.push_back(std::make_unique<Batch>(std::move(device), model, choose));
    }
    const auto sequences = SequencesOf(options.size);
    for (size_t rank = 0; rank < batches_.size(); ++rank) batches_[rank]->Begin(sequences[rank]);
  }
  void Run(bool halves) {
    std::vector<Batch*> all;
    for (const auto& batch : batches_) all.push_back(batch.get());
    RunSteps(all, halves);
  }
  Batch& at(size_t rank) { return *batches_[rank]; }

 private:
  SimClock clock_;
  SimRanks ranks_;
  std::vector<std::unique_ptr<RankGroup>> groups_;
  std::vector<std::unique_ptr<Batch>> batches_;
};

void Full(PolicyOptions& options) { options.name = "full"; }
void Ess(PolicyOptions& options) {
  options.name = "ess";
  options.ess.sparse_memory_ratio = 0.2;
  options.ess.least_places = 0;
  options.ess.prefetch = 8;
}

double Apart(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double apart = 0, most = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    apart = std::max(apart, std::abs(double{got[i]} - double{want[i]}));
    most = std::max(most, std::abs(double{want[i]}));
  }
  return apart / most;
}

void CheckSim(const Choose& choose, bool halves) {
  for (const int size : {2, 4}) {
    const auto sequences = SequencesOf(size);
    std::vector<std::vector<float>> first;  // by rank
    for (uint64_t seed = TestSeed(); seed < TestSeed() + 6; ++seed) {
      INFO(size << " ranks, seed " << seed);
      SimRanksOptions options;
      options.size = size;
      options.seed = seed * 100;
      SimBatches sim(options, choose, halves);
      sim.Run(halves);
      for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
        INFO("rank " << rank);
        REQUIRE(sim.at(rank).device().Health().ToString() == "OK");
        if (first.size() == rank) {
          first.push_back(sim.at(rank).answer());
          if (sequences[rank].empty()) continue;
          CHECK(Apart(first[rank], AnswerAlone(sequences[rank], choose)) < 1e-5);
        }
        CHECK((sim.at(rank).answer() == first[rank]));  // the same bits
      }
    }
  }
}

TEST_CASE("simulated ranks of experts give the same bits in any order of events", "[ranks]") {
  CheckSim(Full, false);
  CheckSim(Ess, false);
}

TEST_CASE("halves of steps give the same bits in any order of events", "[ranks]") {
  CheckSim(Full, true);
  CheckSim(Ess, true);
}

TEST_CASE("a step in halves has the bits of a whole one", "[ranks]") {
  SimRanksOptions options;
  options.size = 2;
  options.seed = TestSeed();
  SimBatches whole(options, Ess, false), halved(options, Ess, true);
  whole.Run(false);
  halved.Run(true);
  for (const size_t rank : {0, 1}) CHECK((halved.at(rank).answer() == whole.at(rank).answer()));
}

TEST_CASE("a simulated rank of experts that is lost ends the others", "[ranks]") {
  for (const bool halves : {false, true}) {
    for (int lost = 0; lost < 3; ++lost) {
      SimRanksOptions options;
      options.size = 4;
      options.seed = TestSeed();
      options.lost_rank = lost;
      options.lost_at = 4 + 3 * lost;  // in the prompts' step, or in the first of decode rows
      SimBatches sim(options, Full, halves);
      sim.Run(halves);
      for (size_t rank = 0; rank < 4; ++rank) {
        const absl::Status health = sim.at(rank).device().Health();
        INFO(lost << " is lost, rank " << rank << ": " << health);
        CHECK(absl::IsUnavailable(health));
        CHECK(ReasonOf(health) == "RANK_LOST");
        CHECK(health.message().find("rank " + std::to_string(lost) + " ") != std::string::npos);
      }
    }
  }
}

}  // namespace
}  // namespace sluice
