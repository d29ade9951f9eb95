#include "src/base/trace_events.h"

namespace sluice {

void TraceEvents::NameProcess(int process, const std::string& name, absl::Time begin) {
  begin_ = begin;
  Name("process_name", process, 0, name);
}

void TraceEvents::NameThread(int process, int thread, const std::string& name) {
  if (named_.emplace(process, thread).second) Name("thread_name", process, thread, name);
}

nlohmann::json& TraceEvents::Slice(int process, int thread, const std::string& name,
                                   const char* category, absl::Time begin, absl::Time end) {
  events_.push_back({{"ph", "X"},
                     {"pid", process},
                     {"tid", thread},
                     {"name", name},
                     {"cat", category},
                     {"ts", Micros(begin)},
                     {"dur", Micros(end) - Micros(begin)}});
  return events_.back();
}

nlohmann::json TraceEvents::Take() {
  return {{"displayTimeUnit", "ns"}, {"traceEvents", std::move(events_)}};
}

void TraceEvents::Name(const char* what, int process, int thread, const std::string& name) {
  events_.push_back(
      {{"ph", "M"}, {"pid", process}, {"tid", thread}, {"name", what}, {"args", {{"name", name}}}});
}

double TraceEvents::Micros(absl::Time t) const {
  return static_cast<double>(absl::ToInt64Nanoseconds(t - begin_)) * 1e-3;
}

}  // namespace sluice
