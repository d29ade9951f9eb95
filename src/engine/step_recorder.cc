#include "src/engine/step_recorder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "src/base/status_macros.h"
#include "src/base/trace_events.h"

namespace sluice {
namespace {

// Process ids of the file.
constexpr int kEngine = 1, kSequences = 2;
constexpr int kHostThread = 1, kStepThread = 2, kDeviceThread = 3;

const char* NameOf(SequenceStage stage) {
  switch (stage) {
    case SequenceStage::kTransfer:
      return "transfer";
    case SequenceStage::kQueued:
      return "queued";
    case SequenceStage::kRunning:
      return "running";
    case SequenceStage::kPreempted:
      return "preempted";
    case SequenceStage::kEnded:
      break;
  }
  return "ended";
}

}  // namespace

StepRecorder::StepRecorder(size_t steps)
    : phases_(steps * kPhasesPerStep), steps_(steps), stages_(kStages) {
  SLUICE_CHECK(steps > 0);
}

void StepRecorder::Phase(const char* name, absl::Time begin, absl::Time end) {
  const std::string_view what = name;
  if (what != "turn" && what != "wait") {
    worked_ = true;
  } else if (!worked_) {
    return;  // an idle engine polls again and again: the record shows one long wait
  } else if (what == "wait") {
    if (last_turn_ != absl::InfinitePast()) begin = last_turn_;
  } else {
    worked_ = false;
    last_turn_ = end;
  }
  phases_.Push({name, begin, end});
}

void StepRecorder::Step(const TracedStep& step) { steps_.Push(step); }

void StepRecorder::Enter(SequenceId id, const Request& request, SequenceStage stage,
                         absl::Time at) {
  const auto found = open_.find(id);
  if (found != open_.end()) {
    found->second.end = at;
    stages_.Push(std::move(found->second));
    open_.erase(found);
  }
  if (stage == SequenceStage::kEnded) return;
  open_.emplace(id, StepRecord::Stage{id, request.request_id, request.trace, stage, at,
                                      absl::InfiniteFuture()});
}

StepRecord StepRecorder::Last(size_t steps) const {
  StepRecord out;
  const size_t first = steps_.size() - std::min(steps, steps_.size());
  for (size_t i = first; i < steps_.size(); ++i) out.steps.push_back(steps_[i]);
  if (out.steps.empty()) return out;
  const absl::Time begin = out.steps.front().begin;
  for (size_t i = 0; i < phases_.size(); ++i) {
    if (phases_[i].end > begin) out.phases.push_back(phases_[i]);
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i].end > begin) out.stages.push_back(stages_[i]);
  }
  for (const auto& [id, stage] : open_) out.stages.push_back(stage);
  std::stable_sort(out.phases.begin(), out.phases.end(),
                   [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::stable_sort(out.stages.begin(), out.stages.end(),
                   [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return out;
}

nlohmann::json ToTraceEvents(const StepRecord& record) {
  TraceEvents events;
  if (record.steps.empty()) return events.Take();
  const absl::Time begin = record.steps.front().begin;
  absl::Time end = record.steps.back().end;
  for (const StepRecord::Phase& phase : record.phases) end = std::max(end, phase.end);
  const auto inside = [&](absl::Time t) { return std::clamp(t, begin, end); };

  events.NameProcess(kEngine, "engine", begin);
  events.NameThread(kEngine, kHostThread, "engine's thread");
  events.NameThread(kEngine, kStepThread, "steps");
  events.NameThread(kEngine, kDeviceThread, "device");
  for (const StepRecord::Phase& phase : record.phases) {
    events.Slice(kEngine, kHostThread, phase.name, "host", inside(phase.begin), inside(phase.end));
  }
  absl::Time device_end = begin;  // end of the step before
  for (const TracedStep& step : record.steps) {
    events.Slice(kEngine, kStepThread, "step", "step", inside(step.begin),
                 inside(step.end))["args"] = {
        {"number", step.number}, {"rows", step.rows}, {"sequences", step.sequences}};
    absl::Time at = std::max(step.end - step.device.copy - step.device.compute - step.device.sample,
                             device_end);
    const std::pair<const char*, absl::Duration> parts[] = {{"copy", step.device.copy},
                                                            {"compute", step.device.compute},
                                                            {"sample", step.device.sample}};
    for (const auto& [name, time] : parts) {
      if (time <= absl::ZeroDuration()) continue;
      const absl::Time until = std::max(std::min(at + time, step.end), at);
      events.Slice(kEngine, kDeviceThread, name, "device", at, until);
      at = until;
    }
    device_end = at;
  }
  events.NameProcess(kSequences, "sequences", begin);
  for (const StepRecord::Stage& stage : record.stages) {
    const int thread = static_cast<int>(stage.sequence.value() & 0x3FFFFFFF);
    events.NameThread(kSequences, thread, stage.request_id);
    events.Slice(kSequences, thread, NameOf(stage.stage), "sequence", inside(stage.begin),
                 inside(stage.end))["args"] = {{"request_id", stage.request_id},
                                               {"x_request_id", stage.trace.request_id},
                                               {"trace_id", std::string(stage.trace.trace_id())},
                                               {"sequence_id", stage.sequence.value()}};
  }
  return events.Take();
}

}  // namespace sluice
