#include "src/bench/harness/step_trace.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

class Phases : public TurnTrace {
 public:
  void Phase(const char* name, absl::Time begin, absl::Time end) override {
    phases_.push_back({name, begin, end});
  }
  void Step(const TracedStep&) override {}
  void Enter(SequenceId, const Request&, SequenceStage, absl::Time) override {}
  std::vector<HostPhase>& phases() { return phases_; }

 private:
  std::vector<HostPhase> phases_;
};

}  // namespace

absl::StatusOr<StepTrace> TraceSteps(EngineRunOptions options, int slots, Device* device,
                                     Model* model, PagePool* hbm, AttentionPolicy* policy) {
  Phases phases;
  options.trace = &phases;
  // The trace starts before the engine is created, so that the programs (graphs) that the engine
  // records are recorded under the trace.
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceTrace> trace, device->StartTrace());
  StepTrace out;
  SLUICE_ASSIGN_OR_RETURN(out.windows, RunEngine(options, slots, device, model, hbm, policy));
  out.name = absl::StrCat("batch ", options.batch, ", context ", options.context);
  out.steps = options.windows * options.steps;
  out.begin = out.windows.front().begin;
  out.end = out.windows.back().end;
  SLUICE_ASSIGN_OR_RETURN(out.device, trace->Stop());
  out.host = std::move(phases.phases());
  const auto outside = [&](const auto& slice) {
    return slice.begin < out.begin || slice.begin >= out.end;
  };
  std::erase_if(out.device, outside);
  std::erase_if(out.host, outside);
  std::sort(out.device.begin(), out.device.end(), [](const TraceSlice& a, const TraceSlice& b) {
    return std::tie(a.stream, a.begin) < std::tie(b.stream, b.begin);
  });
  std::stable_sort(out.host.begin(), out.host.end(),
                   [](const HostPhase& a, const HostPhase& b) { return a.begin < b.begin; });
  return out;
}

}  // namespace sluice::bench
