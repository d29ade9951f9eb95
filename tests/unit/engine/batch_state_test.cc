// Tests of steps as recorded programs: when one serves, and that results do not depend on it.
#include "src/engine/batch_state.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "src/attention/forwarding_policy.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/mailbox.h"
#include "src/device/worker_team.h"
#include "tests/fixtures/fixtures.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kSlots = 6;
constexpr int kMaxRows = 32;
constexpr int kTokens = 256;

// A CPU device that counts the programs that were recorded, and those that ran.
class CountingDevice : public Device {
 public:
  explicit CountingDevice(int row_bucket) : device_(*NewCpuDevice({"auto", 2, row_bucket})) {}
  const std::string& name() const override { return device_->name(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string& what) override {
    return device_->Allocate(kind, bytes, what);
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override { return device_->NewStream(kind); }
  std::unique_ptr<Event> NewEvent() override { return device_->NewEvent(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return device_->NewTimedEvent(); }
  KernelSet& kernels() override { return device_->kernels(); }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) override {
    return device_->NewMailbox(options);
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(
      const WorkerTeamOptions& options, std::function<absl::Status(int, int)> work) override {
    return device_->NewWorkerTeam(options, std::move(work));
  }
  int RowBucket(int rows) const override { return device_->RowBucket(rows); }
  absl::StatusOr<std::unique_ptr<Program>> Record(Stream& stream,
                                                  std::function<void(Stream&)> enqueue) override {
    if (recorded == refused) return absl::InternalError("no more programs");
    ++recorded;
    auto program = device_->Record(stream, std::move(enqueue));
    return std::make_unique<CountingProgram>(*std::move(program), &runs);
  }

  int recorded = 0, runs = 0;
  int refused = -1;  // number of the Record that fails

 private:
  class CountingProgram : public Program {
   public:
    CountingProgram(std::unique_ptr<Program> program, int* runs)
        : program_(std::move(program)), runs_(runs) {}
    void Run(Stream& stream) override {
      ++*runs_;
      program_->Run(stream);
    }

   private:
    const std::unique_ptr<Program> program_;
    int* const runs_;
  };
  const std::unique_ptr<Device> device_;
};

// The parts that the engine has, driven step by step.
struct Rig {
  explicit Rig(int row_bucket) : device(row_bucket) {
    Model::Options options;
    options.directory = fixtures::ModelDir("tiny-llama");
    options.max_context = kTokens;
    options.max_rows = kMaxRows;
    options.max_logits = kSlots;
    model = *Model::Load(options, &device);
    constexpr size_t kBytes = 8 << 20;
    Buffer arena = *device.Allocate(MemoryKind::kDevice, kBytes, "caches");
    std::memset(arena.data(), kUntouched, kBytes);
    pool = *PagePool::Create("hbm", model->cache_layout(), std::move(arena));
    policy = *NewFullPolicy(PolicyOver(&device, pool.get(), kSlots, kTokens));
    stream = device.NewStream(Device::StreamKind::kCompute);
    batch = *BatchState::Create({kSlots, kTokens}, &device, *model);
    recorded = batch->RecordPrograms(*stream, *model, *policy);
  }
  void Join(int slot, const std::vector<int32_t>& prompt, const SamplingParams& params) {
    std::unique_ptr<SequenceCache> none;
    REQUIRE(policy->Admit(slot, 0, kTokens, Promise::kFirm, none));
    policy->WarmEvent(slot).Wait();
    batch->Join(*stream, slot, prompt, params, /*seed=*/static_cast<uint64_t>(slot) + 1,
                static_cast<int32_t>(prompt.size()), {});
  }
  // Runs the plan to its end. Returns one result for each of its samples.
  std::vector<OutputToken> Step(const StepPlan& plan) {
    for (const PlanRow& row : plan.rows) {
      REQUIRE(policy->Grow(row.slot, row.first_position + row.count));
    }
    batch->Begin(*stream, buffer);
    batch->Launch(*stream, buffer, plan, watched != nullptr ? *watched : *model,
                  seen != nullptr ? *seen : *policy);
    batch->event(buffer).Wait();
    const BatchState::Times times = batch->TimesOf(buffer);
    CHECK(times.compute > absl::ZeroDuration());
    CHECK(times.sample >= absl::ZeroDuration());
    std::vector<OutputToken> results;
    results.reserve(static_cast<size_t>(plan.sample_count));
    for (int i = 0; i < plan.sample_count; ++i) results.push_back(batch->Result(buffer, i, 2));
    buffer = (buffer + 1) % BatchState::kDepth;
    return results;
  }

  static constexpr uint8_t kUntouched = 0x3C;
  CountingDevice device;
  std::unique_ptr<Model> model;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<FullPolicy> policy;
  std::unique_ptr<BatchState> batch;
  std::unique_ptr<Stream> stream;
  absl::Status recorded;
  AttentionPolicy* seen = nullptr;  // used in place of `policy`
  Model* watched = nullptr;         // used in place of `model`
  int buffer = 0;
};

StepPlan DecodePlan(const std::vector<PlanRow>& rows) {
  StepPlan plan;
  plan.rows = rows;
  for (const PlanRow& row : rows) {
    plan.row_count += row.count;
    plan.sample_count += row.sample ? 1 : 0;
  }
  plan.decode_rows = plan.row_count;
  return plan;
}

SamplingParams Sampling(uint64_t kind) {
  SamplingParams params;
  params.temperature = kind % 2 == 0 ? 0.0f : 0.9f;
  params.logprobs = 2;
  if (kind % 3 == 0) params.repetition_penalty = 1.2f;
  if (kind % 5 == 0) params.logit_bias = {{7, 1.0f}};
  return params;
}

TEST_CASE("padded programs give what single operators give, to the bit, whoever comes and goes") {
  SplitMix64 random(TestSeed());
  Rig plain(0), padded(GENERATE(1, 4));
  REQUIRE(padded.recorded.ok());
  std::vector<PlannerSequence> sequences(kSlots);
  for (int slot = 0; slot < kSlots; ++slot) sequences[static_cast<size_t>(slot)].slot = slot;
  StepPlan plan;
  int decode_steps = 0, mixed_steps = 0;
  for (int round = 0; round < 300; ++round) {
    for (PlannerSequence& s : sequences) {
      if (s.length != 0 && (s.length >= kTokens - 1 || random.Below(40) == 0)) {
        for (Rig* rig : {&plain, &padded}) rig->policy->Release(s.slot);
        s.length = s.cached = 0;
      } else if (s.length == 0 && random.Below(8) == 0) {
        std::vector<int32_t> prompt(1 + random.Below(60));
        for (int32_t& token : prompt) token = static_cast<int32_t>(random.Below(512));
        const SamplingParams params = Sampling(random());
        for (Rig* rig : {&plain, &padded}) rig->Join(s.slot, prompt, params);
        s.cached = 0;
        s.length = s.prompt_length = static_cast<int64_t>(prompt.size());
      }
      s.runnable = s.length > 0 && random.Below(8) != 0;  // slow readers
    }
    PlanStep({kMaxRows, 20}, sequences, &plan);
    if (plan.rows.empty()) continue;
    ++(plan.decode_rows == plan.row_count ? decode_steps : mixed_steps);
    for (const PlanRow& row : plan.rows) {
      PlannerSequence& s = sequences[static_cast<size_t>(row.slot)];
      s.cached += row.count;
      s.length += row.sample ? 1 : 0;
    }
    const std::vector<OutputToken> want = plain.Step(plan), got = padded.Step(plan);
    for (size_t i = 0; i < want.size(); ++i) {
      INFO("round " << round << ", sample " << i << " of " << want.size());
      REQUIRE(got[i].id == want[i].id);
      REQUIRE(got[i].id >= 0);
      REQUIRE(got[i].logprob == want[i].logprob);
      REQUIRE(got[i].top_logprobs == want[i].top_logprobs);
    }
  }
  INFO(decode_steps << " decode steps, " << mixed_steps << " with rows of prompts");
  CHECK(decode_steps > 50);
  CHECK(mixed_steps > 20);
  CHECK(plain.device.runs == 0);
  CHECK(padded.device.runs == 2 * decode_steps);
}

TEST_CASE("programs are recorded once for each bucket, before the first step") {
  Rig rig(4);
  REQUIRE(rig.recorded.ok());
  constexpr int kRecorded = 2 * 2;  // 4 and 8 rows, forward pass and sampling
  CHECK(rig.device.recorded == kRecorded);
  CHECK(rig.device.runs == 0);
  for (int slot = 0; slot < kSlots; ++slot) rig.Join(slot, {3, 5, 7}, Sampling(0));
  StepPlan prompts;
  for (int slot = 0; slot < kSlots; ++slot) prompts.rows.push_back({slot, 0, 3, true});
  prompts.row_count = 3 * kSlots;
  prompts.sample_count = kSlots;
  rig.Step(prompts);
  CHECK(rig.device.runs == 0);
  std::vector<PlanRow> rows;
  int steps = 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    for (PlanRow& row : rows) ++row.first_position;
    rows.push_back({slot, 3, 1, true});
    rig.Step(DecodePlan(rows));
    CHECK(rig.device.runs == 2 * ++steps);
  }
  // Several rows of each sequence: more than any program has, and still decode rows.
  for (PlanRow& row : rows) row = {row.slot, row.first_position + 1, 3, true};
  rig.Step(DecodePlan(rows));
  CHECK(rig.device.runs == 2 * steps);
  CHECK(rig.device.recorded == kRecorded);
}

TEST_CASE("a program that cannot be recorded is an error at the start") {
  Rig rig(2);
  rig.device.refused = rig.device.recorded + 1;
  CHECK(absl::IsInternal(rig.batch->RecordPrograms(*rig.stream, *rig.model, *rig.policy)));
}

// A policy that wants steps of a size to be recorded again.
class ChangingPolicy : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;
  bool WantsRecording(int32_t decode_rows) override {
    asked.push_back(decode_rows);
    return std::exchange(wants, 0) == decode_rows;
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    if (layer == 0) ++enqueued;
    ForwardingPolicy::Attend(stream, layer, params);
  }
  int32_t wants = 0;
  std::vector<int32_t> asked;
  int enqueued = 0;
};

TEST_CASE("a size of step is recorded again before the step for which the policy wants it") {
  Rig rig(4), plain(4);
  ChangingPolicy policy(rig.policy.get());
  REQUIRE(rig.batch->RecordPrograms(*rig.stream, *rig.model, policy).ok());
  const int recorded = rig.device.recorded;
  for (Rig* each : {&rig, &plain}) each->Join(0, {3, 5, 7}, Sampling(0));
  rig.seen = &policy;
  const auto step = [&](const StepPlan& plan) {
    const std::vector<OutputToken> got = rig.Step(plan), want = plain.Step(plan);
    REQUIRE(got[0].id == want[0].id);
    REQUIRE(got[0].logprob == want[0].logprob);
  };
  StepPlan prompt = DecodePlan({{0, 0, 3, true}});
  prompt.decode_rows = 0;
  step(prompt);
  CHECK(policy.asked.back() == 0);
  for (int position = 3; position < 12; ++position) {
    if (position == 5) policy.wants = 4;
    if (position == 7) policy.wants = 8;  // not the size of this step
    if (position == 9) {                  // the old one goes on to serve
      policy.wants = 4;
      rig.device.refused = rig.device.recorded;
    }
    step(DecodePlan({{0, position, 1, true}}));
    CHECK(policy.asked.back() == 4);
    CHECK(rig.device.recorded == recorded + (position < 5 ? 0 : 1));
  }
  CHECK(policy.asked.size() == 10);
  CHECK(policy.enqueued == 10);  // what was recorded last runs, through the policy
}

// Copies the numbers of every step's decode rows to the host.
class NumberWatch : public Model {
 public:
  explicit NumberWatch(Model* model) : model_(model) {}
  const ModelConfig& config() const override { return model_->config(); }
  const std::string& fingerprint() const override { return model_->fingerprint(); }
  const CacheLayout& cache_layout() const override { return model_->cache_layout(); }
  int max_context() const override { return model_->max_context(); }
  int max_rows() const override { return model_->max_rows(); }
  int max_logits() const override { return model_->max_logits(); }
  int64_t weight_bytes() const override { return model_->weight_bytes(); }
  int64_t workspace_bytes() const override { return model_->workspace_bytes(); }
  void Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) override {
    stream.Copy(numbers, in.numbers, static_cast<size_t>(in.decode_rows) * sizeof(int32_t));
    model_->Forward(stream, in, policy);
  }

  int32_t numbers[kMaxRows] = {};

 private:
  Model* const model_;
};

TEST_CASE("the model learns how many decode rows of its sequence a row follows") {
  for (const int row_bucket : {0, 4}) {
    Rig rig(row_bucket);
    NumberWatch watch(rig.model.get());
    REQUIRE(rig.batch->RecordPrograms(*rig.stream, watch, *rig.policy).ok());
    rig.watched = &watch;
    for (const int slot : {0, 1}) rig.Join(slot, {3, 5, 7}, Sampling(0));
    StepPlan prompts = DecodePlan({{0, 0, 3, true}, {1, 0, 3, true}});
    prompts.decode_rows = 0;
    rig.Step(prompts);
    std::fill_n(watch.numbers, kMaxRows, -1);
    rig.Step(DecodePlan({{1, 3, 1, false, 0, true}, {0, 3, 1, true, 5}}));
    CHECK(std::vector(watch.numbers, watch.numbers + 2) == std::vector<int32_t>{0, 5});
    rig.Step(DecodePlan({{1, 3, 1, true, 1}}));
    CHECK(watch.numbers[0] == 1);
  }
}

TEST_CASE("padded rows write nothing: no page of anyone, no result") {
  Rig rig(kSlots);
  REQUIRE(rig.recorded.ok());
  constexpr int kSlot = 2;
  rig.Join(kSlot, {3, 5, 7}, Sampling(0));
  for (int step = 0; step < 40; ++step) {
    const PlanRow row{kSlot, step == 0 ? 0 : step + 2, step == 0 ? 3 : 1, true};
    StepPlan plan = DecodePlan({row});
    if (step == 0) plan.decode_rows = 0;
    rig.Step(plan);
  }
  CHECK(rig.device.runs == 2 * 39);
  const int64_t page_bytes = rig.model->cache_layout().kinds[0].page_bytes();
  for (const PageRun& run : rig.pool->FreeRuns(0)) {
    const uint8_t* begin = rig.pool->PageAddress(0, run.first);
    const uint8_t* end = begin + run.count * page_bytes;
    CHECK(std::all_of(begin, end, [](uint8_t byte) { return byte == Rig::kUntouched; }));
  }
  for (int buffer = 0; buffer < BatchState::kDepth; ++buffer) {
    for (int padded = 1; padded < kSlots; ++padded) {
      const OutputToken none = rig.batch->Result(buffer, padded, 2);  // zeroed at the start
      CHECK(none.id == 0);
      CHECK(none.logprob == 0);
    }
  }
}

}  // namespace
}  // namespace sluice
