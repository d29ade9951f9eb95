#include "src/engine/step_recorder.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/clock.h"

namespace sluice {
namespace {

using nlohmann::json;

absl::Time At(int64_t us) { return absl::UnixEpoch() + absl::Microseconds(us); }

Request Named(const std::string& id) {
  Request request;
  request.request_id = id;
  request.trace.request_id = "x-" + id;
  request.trace.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  return request;
}

// Reports a step of 100 us from `us` on, as the engine does in one turn.
void OneStep(StepRecorder& recorder, uint64_t number, int64_t us) {
  recorder.Phase("plan", At(us), At(us + 10));
  recorder.Phase("launch", At(us + 10), At(us + 20));
  recorder.Phase("emit", At(us + 95), At(us + 99));
  recorder.Step({number,
                 2,
                 1,
                 At(us),
                 At(us + 95),
                 {absl::Microseconds(5), absl::Microseconds(60), absl::Microseconds(10)}});
  recorder.Phase("wait", At(us - 1), At(us));
  recorder.Phase("turn", At(us), At(us + 99));
}

std::vector<json> Slices(const json& file, const std::string& category) {
  std::vector<json> out;
  for (const json& event : file["traceEvents"]) {
    if (event["ph"] == "X" && event["cat"] == category) out.push_back(event);
  }
  return out;
}

TEST_CASE("the newest steps are kept, and what came before them is not in the file") {
  StepRecorder recorder(4);
  for (int i = 0; i < 10; ++i) OneStep(recorder, static_cast<uint64_t>(i), 1000 + 100 * i);
  const StepRecord all = recorder.Last(100);
  REQUIRE(all.steps.size() == 4);
  CHECK(all.steps.front().number == 6);
  CHECK(all.steps.back().number == 9);
  const StepRecord two = recorder.Last(2);
  CHECK(two.steps.front().number == 8);
  for (const auto& phase : two.phases) CHECK(phase.end > two.steps.front().begin);
  CHECK(two.phases.size() == 2 * 5 - 1);  // the wait before the first ended with its begin
  CHECK(StepRecorder(4).Last(4).steps.empty());
}

TEST_CASE("turns in which nothing was done are one wait") {
  StepRecorder recorder(4);
  OneStep(recorder, 1, 1000);
  for (int i = 0; i < 100; ++i) {
    recorder.Phase("wait", At(1099 + 10 * i), At(1105 + 10 * i));
    recorder.Phase("turn", At(1105 + 10 * i), At(1109 + 10 * i));
  }
  OneStep(recorder, 2, 3000);
  int waits = 0;
  for (const auto& phase : recorder.Last(4).phases) {
    if (std::string(phase.name) != "wait" || phase.begin < At(1000)) continue;
    ++waits;
    CHECK(phase.begin == At(1099));
    CHECK(phase.end == At(3000));
  }
  CHECK(waits == 1);
}

TEST_CASE("a sequence's stages follow each other, and one that is alive has its own") {
  StepRecorder recorder(8);
  const Request a = Named("a"), b = Named("b"), old = Named("old");
  recorder.Enter(SequenceId(1), old, SequenceStage::kQueued, At(100));
  recorder.Enter(SequenceId(1), old, SequenceStage::kEnded, At(200));
  recorder.Enter(SequenceId(2), a, SequenceStage::kTransfer, At(900));
  OneStep(recorder, 1, 1000);
  recorder.Enter(SequenceId(2), a, SequenceStage::kQueued, At(1010));
  recorder.Enter(SequenceId(2), a, SequenceStage::kRunning, At(1020));
  recorder.Enter(SequenceId(3), b, SequenceStage::kRunning, At(1030));
  recorder.Enter(SequenceId(2), a, SequenceStage::kPreempted, At(1040));
  recorder.Enter(SequenceId(2), a, SequenceStage::kEnded, At(1050));
  OneStep(recorder, 2, 1100);
  const json file = ToTraceEvents(recorder.Last(8));
  std::vector<std::string> of_a;
  double end = 0;
  for (const json& slice : Slices(file, "sequence")) {
    CHECK(slice["args"]["request_id"] != "old");
    CHECK(slice["ts"].get<double>() >= 0);
    if (slice["args"]["request_id"] != "a") continue;
    of_a.push_back(slice["name"]);
    CHECK(slice["args"]["x_request_id"] == "x-a");
    CHECK(slice["args"]["trace_id"] == "0af7651916cd43dd8448eb211c80319c");
    if (end > 0) CHECK(slice["ts"].get<double>() == Approx(end));
    end = slice["ts"].get<double>() + slice["dur"].get<double>();
  }
  CHECK(of_a == std::vector<std::string>{"transfer", "queued", "running", "preempted"});
  CHECK(end == Approx(50));
  const std::vector<json> slices = Slices(file, "sequence");
  const auto of_b = std::find_if(slices.begin(), slices.end(), [](const json& slice) {
    return slice["args"]["request_id"] == "b";
  });
  REQUIRE(of_b != slices.end());
  CHECK((*of_b)["dur"].get<double>() == Approx(1199 - 1030));
}

TEST_CASE("the device's parts lie one after the other and end with their step") {
  StepRecorder recorder(8);
  OneStep(recorder, 1, 1000);
  OneStep(recorder, 2, 1100);
  const json file = ToTraceEvents(recorder.Last(8));
  const std::vector<json> parts = Slices(file, "device");
  REQUIRE(parts.size() == 6);
  double end = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i]["name"] == (std::vector<std::string>{"copy", "compute", "sample"})[i % 3]);
    CHECK(parts[i]["ts"].get<double>() >= end - 1e-6);
    end = parts[i]["ts"].get<double>() + parts[i]["dur"].get<double>();
    if (i % 3 == 2) CHECK(end == Approx(95 + 100 * static_cast<double>(i / 3)));
  }
  const std::vector<json> steps = Slices(file, "step");
  REQUIRE(steps.size() == 2);
  CHECK(steps[0]["args"] == json({{"number", 1}, {"rows", 2}, {"sequences", 1}}));
}

TEST_CASE("a record without steps is an empty file") {
  CHECK(ToTraceEvents(StepRecorder(1).Last(1))["traceEvents"].empty());
}

TEST_CASE("what recording costs a step", "[.][benchmark]") {
  StepRecorder recorder(512);
  constexpr int kSteps = 1'000'000;
  const absl::Time begin = absl::Now();
  for (int i = 0; i < kSteps; ++i) OneStep(recorder, static_cast<uint64_t>(i), 100 * i);
  const absl::Duration each = (absl::Now() - begin) / kSteps;
  WARN("a step: " << absl::FormatDuration(each));
  CHECK(each < absl::Microseconds(1));
}

}  // namespace
}  // namespace sluice
