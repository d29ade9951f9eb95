#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/attention/policies/full/full_policy.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/trace/chrome_trace.h"
#include "src/bench/trace/trace_summary.h"
#include "src/device/cpu/cpu_device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "tests/fixtures/fixtures.h"

namespace sluice::bench {
namespace {

using Kind = TraceSlice::Kind;

absl::Time At(int64_t us) { return absl::FromUnixSeconds(1'000'000) + absl::Microseconds(us); }

TraceSlice Slice(Kind kind, const char* name, uint32_t stream, int64_t begin, int64_t end,
                 uint64_t launch = 0) {
  return {kind, name, stream, At(begin), At(end), kind == Kind::kKernel ? 0 : 64, launch};
}

// Two steps of a stream, launched kernel by kernel, and a copy stream beside it.
StepTrace TwoSteps() {
  StepTrace trace;
  trace.name = "batch 1, context 2";
  trace.steps = 2;
  trace.begin = At(0);
  trace.end = At(200);
  trace.device = {
      Slice(Kind::kCopy, "rows in", 1, 0, 2),    Slice(Kind::kKernel, "linear", 1, 10, 40),
      Slice(Kind::kKernel, "norm", 1, 46, 50),   Slice(Kind::kKernel, "linear", 1, 52, 80),
      Slice(Kind::kCopy, "out", 1, 90, 92),      Slice(Kind::kCopy, "rows in", 1, 100, 102),
      Slice(Kind::kKernel, "norm", 1, 110, 150), Slice(Kind::kCopy, "side", 2, 5, 95)};
  trace.host = {{"plan", At(0), At(3)}, {"launch", At(3), At(9)}, {"wait", At(9), At(150)}};
  return trace;
}

double Micros(double seconds) { return seconds * 1e6; }

// Every thread's slices nest or follow each other, and none has a negative length.
void CheckNesting(const nlohmann::json& chrome) {
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> threads;
  for (const auto& event : chrome.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts"), length = event.at("dur");
    REQUIRE(length >= 0);
    threads[{event.at("pid"), event.at("tid")}].emplace_back(begin, begin + length);
  }
  REQUIRE(!threads.empty());
  constexpr double kRounding = 1e-3;
  for (auto& [thread, slices] : threads) {
    for (size_t i = 0; i < slices.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const auto& a = slices[j];
        const auto& b = slices[i];
        const bool apart = a.second <= b.first + kRounding || b.second <= a.first + kRounding;
        const bool nested = (a.first <= b.first + kRounding && b.second <= a.second + kRounding) ||
                            (b.first <= a.first + kRounding && a.second <= b.second + kRounding);
        INFO("thread " << thread.second);
        REQUIRE((apart || nested));
      }
    }
  }
}

TEST_CASE(
    "gaps between kernels launched one by one are inside a step, beside a copy they are not") {
  const std::vector<TraceGap> gaps = FindGaps(TwoSteps().device);
  std::vector<std::pair<int64_t, bool>> found;
  for (const TraceGap& gap : gaps) {
    CHECK(gap.stream == 1);  // The copy stream has none.
    found.emplace_back(absl::ToInt64Microseconds(gap.end - gap.begin), gap.inside_step);
  }
  CHECK(found == std::vector<std::pair<int64_t, bool>>{
                     {8, false}, {6, true}, {2, true}, {10, false}, {8, false}, {8, false}});
}

TEST_CASE("slices of one graph launch are one step, copies included") {
  const std::vector<TraceSlice> device = {
      Slice(Kind::kCopy, "in", 7, 0, 2, 41), Slice(Kind::kKernel, "a", 7, 3, 10, 41),
      Slice(Kind::kKernel, "b", 7, 9, 20, 41),  // Begins under the tail of a.
      Slice(Kind::kKernel, "a", 7, 30, 40, 42)};
  const std::vector<TraceGap> gaps = FindGaps(device);
  REQUIRE(gaps.size() == 2);
  CHECK(gaps[0].inside_step);
  CHECK(gaps[0].after == "in");
  CHECK_FALSE(gaps[1].inside_step);
  CHECK(gaps[1].begin == At(20));
}

TEST_CASE("a summary adds up kernels once where they overlap, and gaps by their place") {
  const TraceSummary s = Summarize(TwoSteps());
  CHECK(Micros(s.step) == Approx(100));
  CHECK(Micros(s.kernels) == Approx((30 + 4 + 28 + 40) / 2.0));
  CHECK(Micros(s.copies) == Approx((2 + 2 + 2 + 90) / 2.0));
  CHECK(Micros(s.gaps_inside) == Approx(4));
  CHECK(Micros(s.gaps_between) == Approx(17));
  CHECK(Micros(s.largest_gap_inside) == Approx(6));
  CHECK(s.largest_gap_after == "linear");
  CHECK(s.largest_gap_before == "norm");
  CHECK(s.gaps_over_5_us == 1);
  CHECK(Micros(s.wait) == Approx(70.5));
  REQUIRE(s.kernel_times.size() == 2);
  CHECK(s.kernel_times[0].name == "linear");
  CHECK(s.kernel_times[0].calls == Approx(1));

  StepTrace overlapping;
  overlapping.steps = 1;
  overlapping.begin = At(0);
  overlapping.end = At(30);
  overlapping.device = {Slice(Kind::kKernel, "a", 1, 0, 20), Slice(Kind::kKernel, "b", 1, 10, 30)};
  const TraceSummary both = Summarize(overlapping);
  CHECK(Micros(both.kernels) == Approx(30));
  REQUIRE(both.kernel_times.size() == 2);
  CHECK(both.kernel_times[0].name == "a");
  CHECK(Micros(both.kernel_times[0].seconds) == Approx(20));
  CHECK(Micros(both.kernel_times[1].seconds) == Approx(10));
  CHECK(Micros(both.kernel_times[1].begin_to_end) == Approx(20));
}

TEST_CASE("overlapping kernels of a stream do not overlap in the trace file") {
  StepTrace trace = TwoSteps();
  trace.device = {Slice(Kind::kKernel, "a", 1, 0, 20), Slice(Kind::kKernel, "b", 1, 15, 40),
                  Slice(Kind::kKernel, "c", 1, 18, 60), Slice(Kind::kKernel, "d", 1, 59, 70)};
  const nlohmann::json chrome = ChromeTrace({trace});
  CheckNesting(chrome);
  size_t kernels = 0;
  for (const auto& event : chrome.at("traceEvents")) {
    kernels += event.value("cat", "") == "kernel" ? 1 : 0;
  }
  CHECK(kernels == 4);
}

TEST_CASE("the engine's steps on the CPU device are traced as they ran") {
  auto device = NewCpuDevice({"portable", 2});
  REQUIRE(device.ok());
  Model::Options options;
  options.directory = fixtures::SourceDir("tiny-llama");
  options.load_format = "dummy";
  options.max_context = 256;
  options.max_rows = 8;
  options.max_logits = 4;
  auto model = Model::Load(options, device->get());
  REQUIRE(model.ok());
  auto memory = (*device)->Allocate(MemoryKind::kDevice, size_t{8} << 20, "test");
  REQUIRE(memory.ok());
  auto pool = PagePool::Create("hbm", (*model)->cache_layout(), *std::move(memory));
  REQUIRE(pool.ok());
  auto policy = NewFullPolicy(PolicyOver(device->get(), pool->get(), 4, 256));
  REQUIRE(policy.ok());

  constexpr int kSteps = 6;
  EngineRunOptions run{/*batch=*/3, /*context=*/40, 1, kSteps};
  const auto trace = TraceSteps(run, 4, device->get(), model->get(), pool->get(), policy->get());
  INFO(std::string(trace.status().ToString()));
  REQUIRE(trace.ok());

  std::map<std::string, int> calls;
  for (const TraceSlice& slice : trace->device) {
    CHECK(slice.end >= slice.begin);
    ++calls[slice.name];
  }
  // The stretch is cut by the host's clock, so a step may lie across either end of it.
  const int layers = (*model)->cache_layout().layers;
  CHECK(calls["attention"] >= (kSteps - 1) * layers);
  CHECK(calls["attention"] <= (kSteps + 1) * layers);
  CHECK(calls["sample"] >= kSteps - 1);
  std::map<std::string, int> phases;
  for (const HostPhase& phase : trace->host) ++phases[phase.name];
  for (const char* name : {"plan", "launch", "emit", "turn"}) {
    INFO(name);
    CHECK(phases[name] >= kSteps - 1);
  }

  // The stream runs one slice at a time, so its slices and gaps fill its time.
  const TraceSummary s = Summarize(*trace);
  absl::Duration covered;
  for (const TraceSlice& slice : trace->device) covered += slice.end - slice.begin;
  for (const TraceGap& gap : FindGaps(trace->device)) covered += gap.end - gap.begin;
  std::map<uint32_t, std::pair<absl::Time, absl::Time>> streams;
  for (const TraceSlice& slice : trace->device) {
    auto [it, first] = streams.try_emplace(slice.stream, slice.begin, slice.end);
    if (!first) it->second.second = std::max(it->second.second, slice.end);
  }
  REQUIRE(streams.size() == 1);
  const absl::Duration span = streams.begin()->second.second - streams.begin()->second.first;
  CHECK(absl::ToDoubleSeconds(covered) == Approx(absl::ToDoubleSeconds(span)).epsilon(1e-6));
  CHECK(s.kernels <= s.step * 1.5);

  const nlohmann::json chrome = nlohmann::json::parse(ChromeTrace({*trace}).dump());
  CheckNesting(chrome);
  fixtures::TempDir folder;
  REQUIRE(WriteChromeTrace({*trace}, folder.path() + "/trace.json").ok());
  const auto text = fixtures::ReadFile(folder.path() + "/trace.json");
  REQUIRE(text.ok());
  CHECK(nlohmann::json::parse(*text) == chrome);
  CHECK_FALSE(WriteChromeTrace({*trace}, folder.path() + "/none/trace.json").ok());
}

}  // namespace
}  // namespace sluice::bench
