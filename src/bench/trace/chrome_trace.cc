#include "src/bench/trace/chrome_trace.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/trace_events.h"
#include "src/bench/trace/trace_summary.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr absl::Duration kShownGap = absl::Microseconds(1);
// A process has the engine's thread, and for every stream two lanes and its gaps.
constexpr int kHostThread = 1;
constexpr int kThreadsPerStream = 3;
constexpr int kGapLane = 2;
int ThreadOf(uint32_t stream, int lane) {
  return 10 + static_cast<int>(stream) * kThreadsPerStream + lane;
}

class Writer {
 public:
  Writer(TraceEvents* events, int process, const StepTrace& trace)
      : events_(events), process_(process), trace_(trace) {}

  void Run() {
    events_->NameProcess(process_, trace_.name, trace_.begin);
    Thread(kHostThread, "engine");
    for (const HostPhase& phase : trace_.host) {
      Slice(kHostThread, phase.name, "host", phase.begin, phase.end);
    }
    // The end of each lane's last slice.
    std::map<int, absl::Time> busy_until;
    for (const TraceSlice& slice : trace_.device) {
      const int first = ThreadOf(slice.stream, 0);
      const auto it = busy_until.find(first);
      const bool overlaps = it != busy_until.end() && slice.begin < it->second;
      const int thread = ThreadOf(slice.stream, overlaps ? 1 : 0);
      // A third kernel at the same time is cut: two lanes show every kernel that starts under
      // another's tail.
      const auto lane = busy_until.try_emplace(thread, absl::InfinitePast()).first;
      const absl::Time begin = std::max(slice.begin, lane->second);
      const absl::Time end = std::max(slice.end, begin);
      lane->second = end;
      Thread(thread, absl::StrCat("stream ", slice.stream, overlaps ? ", overlapping" : ""));
      json& event = Slice(thread, slice.name, SliceKindName(slice.kind), begin, end);
      if (slice.kind != TraceSlice::Kind::kKernel) event["args"]["bytes"] = slice.bytes;
    }
    for (const TraceGap& gap : FindGaps(trace_.device)) {
      if (gap.end - gap.begin < kShownGap) continue;
      const int thread = ThreadOf(gap.stream, kGapLane);
      Thread(thread, absl::StrCat("stream ", gap.stream, ", gaps"));
      json& event =
          Slice(thread, gap.inside_step ? "gap" : "gap between steps", "gap", gap.begin, gap.end);
      event["args"] = {{"after", gap.after}, {"before", gap.before}};
    }
  }

 private:
  void Thread(int thread, const std::string& name) { events_->NameThread(process_, thread, name); }
  json& Slice(int thread, const std::string& name, const char* category, absl::Time begin,
              absl::Time end) {
    return events_->Slice(process_, thread, name, category, begin, end);
  }

  TraceEvents* const events_;
  const int process_;
  const StepTrace& trace_;
};

}  // namespace

json ChromeTrace(const std::vector<StepTrace>& traces) {
  TraceEvents events;
  for (size_t i = 0; i < traces.size(); ++i) {
    Writer(&events, static_cast<int>(i) + 1, traces[i]).Run();
  }
  return events.Take();
}

absl::Status WriteChromeTrace(const std::vector<StepTrace>& traces, const std::string& path) {
  std::ofstream out(path, std::ios::trunc);
  out << ChromeTrace(traces).dump() << "\n";
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

}  // namespace sluice::bench
