// Tests of the cost of transfers in a step: selections with forced misses, two versions of a step,
// and the evaluation of a trace.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/bench/harness/step_device.h"
#include "src/bench/overlap/forced_misses.h"
#include "src/bench/overlap/overlap_report.h"
#include "src/bench/overlap/overlap_run.h"
#include "src/bench/overlap/overlap_trace.h"
#include "src/bench/policies/forecast.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice::bench {
namespace {

TEST_CASE("forced misses: a list of a phase m further on has exactly m other positions") {
  for (const int top_k : {96, 128, 2048}) {
    for (const int64_t stride : {2, 12, 57}) {
      int64_t phase = 0;
      std::vector<int32_t> before = ForcedMisses::ListAt(phase, top_k, stride);
      for (const int misses : {0, 1, 7, top_k / 2, top_k - 1, top_k}) {
        phase += misses;
        const std::vector<int32_t> list = ForcedMisses::ListAt(phase, top_k, stride);
        INFO("top_k " << top_k << ", stride " << stride << ", misses " << misses);
        REQUIRE(std::is_sorted(list.begin(), list.end()));
        REQUIRE(std::set<int32_t>(list.begin(), list.end()).size() == list.size());
        REQUIRE(list.front() >= 0);
        REQUIRE(list.back() < top_k * stride);
        const std::set<int32_t> old(before.begin(), before.end());
        REQUIRE(std::count_if(list.begin(), list.end(),
                              [&](int32_t id) { return !old.contains(id); }) == misses);
        before = list;
      }
    }
  }
}

TEST_CASE("forced misses: new positions are spread over the range") {
  constexpr int kTopK = 2048, kStride = 12, kMisses = 64, kParts = 8;
  const std::vector<int32_t> before = ForcedMisses::ListAt(1000, kTopK, kStride);
  const std::set<int32_t> old(before.begin(), before.end());
  std::vector<int> parts(kParts);
  for (const int32_t id : ForcedMisses::ListAt(1000 + kMisses, kTopK, kStride)) {
    if (!old.contains(id)) ++parts[static_cast<size_t>(id) * kParts / (kTopK * kStride)];
  }
  for (const int part : parts) CHECK(part >= kMisses / kParts / 2);
}

TEST_CASE("forced misses: rows select the list of their step") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 1});
  constexpr int kRows = 3, kTopK = 8;
  ForcedMisses::Options options;
  options.device = device.get();
  options.rows = kRows;
  options.top_k = kTopK;
  options.tokens = 64;
  options.places = 16;
  options.misses = {5, 2, 3};
  const auto set = ForcedMisses::Create(options);
  REQUIRE(set.ok());
  Buffer memory = *device->Allocate(MemoryKind::kDevice, (kRows + 1) * kTopK * 4, "lists");
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  const auto done = device->NewEvent();
  // After the last step its list is kept; rows outside the range stay as they were.
  (*set)->BeginStep(*stream, {{0, 2, 7}});
  const kernels::UnitLists lists{memory.as<int32_t>(), nullptr, kTopK};
  (*set)->Observer()(*stream, 0, lists, 1, 2);
  stream->Record(*done);
  done->Wait();
  const auto list = [&](int row) {
    const int32_t* at = memory.as<int32_t>() + row * kTopK;
    return std::vector<int32_t>(at, at + kTopK);
  };
  CHECK(list(0) == std::vector<int32_t>(kTopK, 0));
  CHECK(list(1) == ForcedMisses::ListAt(5, kTopK, 8));
  CHECK(list(2) == ForcedMisses::ListAt(5, kTopK, 8));
  CHECK(list(3) == std::vector<int32_t>(kTopK, 0));
  CHECK(ForcedMisses::ListAt(5, kTopK, 8) != ForcedMisses::ListAt(0, kTopK, 8));
}

TEST_CASE("forced misses: positions that would come back while they are in the pool are refused") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 1});
  ForcedMisses::Options options;
  options.device = device.get();
  options.rows = 1;
  options.top_k = 8;
  options.tokens = 32;  // A position comes back after 24 others.
  options.places = 30;
  options.misses = {0, 8, 8, 8};
  CHECK(ForcedMisses::Create(options).ok());
  options.misses.push_back(1);
  CHECK_FALSE(ForcedMisses::Create(options).ok());
  options.places = 24;  // The pool has forgotten the position by then.
  CHECK(ForcedMisses::Create(options).ok());
  options.tokens = 7;
  CHECK_FALSE(ForcedMisses::Create(options).ok());
  options.tokens = 32;
  options.misses = {0, 9};
  CHECK(std::string(ForcedMisses::Create(options).status().message()).find('9') !=
        std::string::npos);
}

TEST_CASE("a recording has two versions, of which each run takes one") {
  const std::unique_ptr<Device> cpu = *NewCpuDevice({"auto", 1, 4});
  bool version = false;
  const std::unique_ptr<Device> device = NewStepDevice(cpu.get(), {.version = &version});
  Buffer memory = *device->Allocate(MemoryKind::kDevice, 64, "bytes");
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  const auto done = device->NewEvent();
  // Acts like a policy that reads the switch when it enqueues.
  std::vector<bool> recorded;
  const auto program = device->Record(*stream, [&](Stream& s) {
    recorded.push_back(version);
    s.Fill(memory.data(), version ? 2 : 1, 1);
  });
  REQUIRE(program.ok());
  CHECK_FALSE(version);
  for (const bool wanted : {false, true, false}) {
    version = wanted;
    (*program)->Run(*stream);
    stream->Record(*done);
    done->Wait();
    CHECK(memory.as<uint8_t>()[0] == (wanted ? 2 : 1));
  }
  CHECK(device->RowBucket(3) == cpu->RowBucket(3));
  CHECK(NewStepDevice(cpu.get(), {.record = false})->RowBucket(3) == 0);
}

// Layers as a trace has them, microseconds: UpdateResidency (twice in halves), queries, attention,
// its sums.
StepTrace TraceOf(int layers, bool halves, double transfer_us) {
  const absl::Time start = absl::FromUnixSeconds(100);
  StepTrace trace;
  trace.steps = 1;
  const auto add = [&](const char* name, uint32_t stream, double from, double to) {
    TraceSlice slice;
    slice.name = name;
    slice.stream = stream;
    slice.begin = start + absl::Nanoseconds(from * 1e3);
    slice.end = start + absl::Nanoseconds(to * 1e3);
    trace.device.push_back(slice);
  };
  for (int layer = 0; layer < layers; ++layer) {
    const double at = 1000 * layer;
    if (halves) add("UpdateResidencyKernel", 1, at, at + 10);
    add("TopKKernel<1>", 1, at + 10, at + 30);
    add("UpdateResidencyKernel", 1, at + 30, at + 40);
    add("MlaQueryKernel", 1, at + 40, at + 90);
    add("PackedMlaKernel", 1, at + 90, at + 190);
    add("CombineMlaKernel<2>", 1, at + 190, at + 200);
    if (transfer_us > 0) add("TransferKernel", 2, at + 40, at + 40 + transfer_us);
  }
  trace.begin = start;
  trace.end = start + absl::Microseconds(1000 * layers);
  return trace;
}

TEST_CASE("a transfer runs beneath what lies between its lists and the end of attention") {
  const Shelter da = ShelterIn(TraceOf(3, false, 0));
  CHECK(da.layers == 3);
  CHECK(da.beneath == Approx(160e-6));
  CHECK(da.ahead == 0);
  CHECK(da.Coverable(100e-6) == Approx(100e-6));
  CHECK(da.Coverable(200e-6) == Approx(160e-6));
  const Shelter dba = ShelterIn(TraceOf(3, true, 0));
  CHECK(dba.beneath == Approx(160e-6));
  CHECK(dba.ahead == Approx(30e-6));
  // The first half, of 20, is done before the second half's lists are, so its 20 cost nothing.
  CHECK(dba.Coverable(40e-6) == Approx(40e-6));
  CHECK(dba.Coverable(330e-6) == Approx(190e-6));  // Halves of 165, the first 30 ahead.
  CHECK(ShelterIn(StepTrace()).layers == 0);
}

TEST_CASE("a trace's transfers are told from its compute, whatever part of a step it has") {
  constexpr int kLayers = 2;
  const StepTrace whole = TraceOf(8, false, 80);  // Four steps.
  CHECK(StepsIn(whole, kLayers) == Approx(4));
  const StepTrace part = PartOf(whole, whole.begin + absl::Milliseconds(1), whole.end);
  CHECK(StepsIn(part, kLayers) == Approx(3.5));
  for (const StepTrace* const trace : {&whole, &part}) {
    const TransfersInside with = TransfersIn(*trace, kLayers);
    CHECK(with.calls == Approx(2));
    CHECK(with.seconds == Approx(160e-6));
    CHECK(with.compute_seconds == Approx(2 * 190e-6));
  }
  const TransfersInside none = TransfersIn(TraceOf(2, false, 0), kLayers);
  CHECK(none.calls == 0);
  CHECK(none.compute_seconds == Approx(2 * 190e-6));
  CHECK(TransfersIn(StepTrace(), kLayers).compute_seconds == 0);
  const TransfersInside with = TransfersIn(whole, kLayers);
  CHECK(FetchesOf(with, none)->calls == Approx(2));
  CHECK(FetchesOf(with, none)->seconds == Approx(160e-6));
  CHECK_FALSE(FetchesOf(none, none).has_value());
  TransfersInside brief = with;  // Empty lists, and a clock coarser than their transfers.
  brief.seconds = 0;
  const TransfersInside home = {.seconds = 1e-6, .calls = 1};
  CHECK(FetchesOf(brief, home)->seconds == 0);
  CHECK(FetchesOf(brief, home)->calls == Approx(1));
  StepTrace slowed = part;
  for (TraceSlice& slice : slowed.device) {
    if (slice.name == "TopKKernel<1>") slice.end += absl::Microseconds(5);
  }
  const auto kernels = ComparedKernels(slowed, whole, kLayers);
  CHECK(kernels.front().name == "TopKKernel<1>");
  CHECK(kernels.front().with == Approx(50e-6));
  CHECK(kernels.front().without == Approx(40e-6));
}

TEST_CASE("the hidden share is the part of the transfers that does not lengthen the step") {
  OverlapLevel level;
  level.misses = {10, 30};
  level.step.median = 1.02;
  level.without.median = 1;
  level.alone.seconds = 0.4;
  CHECK(level.HiddenOf(level.alone.seconds) == Approx(0.95));
  CHECK(level.HiddenOf(0) == 1);
  CHECK_FALSE(level.Coverable().has_value());
  Shelter shelter;
  shelter.layers = 1;
  shelter.beneath = 0.2;  // The layers' transfers take 0.1 and 0.3.
  level.shelter = shelter;
  CHECK(*level.Coverable() == Approx(0.3));
}

TEST_CASE("a forecast extends the line through the measured batches") {
  const auto run = [](const char* policy, int batch, double seconds, int64_t hbm, int64_t dram) {
    PolicyRun r;
    r.policy = policy;
    r.context = 1000;
    r.batch = batch;
    r.step.median = seconds;
    r.admission.hbm_bytes_each = hbm;
    r.admission.dram_bytes_each = dram;
    return r;
  };
  const std::vector<PolicyRun> runs = {
      run("full", 1, 0.010, 100, 100), run("full", 5, 0.014, 100, 100),
      run("ess", 2, 0.012, 20, 100), run("ess", 12, 0.022, 20, 100), run("alone", 3, 0.01, 10, 10)};
  const std::vector<Forecast> found = ForecastsOf(runs, {1000, 4000});
  REQUIRE(found.size() == 2);  // One batch makes no line.
  CHECK(found[0].policy == "full");
  CHECK(found[0].batch == 10);
  CHECK(found[0].bound == "HBM");
  CHECK(found[0].step_seconds.value() == Approx(0.019));
  CHECK(found[1].batch == 40);
  CHECK(found[1].bound == "DRAM");
  CHECK(found[1].step_seconds.value() == Approx(0.050));
  CHECK(found[1].tokens_per_second().value() == Approx(800));
  CHECK(ForecastText(found, {1000, 4000}).find("1.52 x full") != std::string::npos);
}

TEST_CASE("a forecast has no speed where larger batches took no longer") {
  PolicyRun run;
  run.policy = "full";
  run.batch = 1;
  run.step.median = 0.002;
  run.admission.hbm_bytes_each = 100;
  PolicyRun larger = run;
  larger.batch = 4;
  larger.step.median = 0.001;
  const std::vector<Forecast> found = ForecastsOf({run, larger}, {1000, 1000});
  REQUIRE(found.size() == 1);
  CHECK(found[0].batch == 10);
  CHECK_FALSE(found[0].tokens_per_second().has_value());
  CHECK(ForecastText(found, {1000, 1000})
            .find("no speed: larger batches took no longer (measured ") != std::string::npos);
  CHECK(ForecastJson(found[0], {1000, 1000})["tokens_per_second"].is_null());
}

}  // namespace
}  // namespace sluice::bench
