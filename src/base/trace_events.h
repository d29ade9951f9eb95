// TraceEvents writes, event by event, a file that chrome://tracing and ui.perfetto.dev open. It is
// in the Trace Event Format: "traceEvents" with complete events ("X") in microseconds, and the
// names of processes and threads.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace sluice {

class TraceEvents {
 public:
  // Names a process. `begin` is time 0 of the processes that are named from here on.
  void NameProcess(int process, const std::string& name, absl::Time begin);
  // Names a thread. A second call for the same thread does nothing.
  void NameThread(int process, int thread, const std::string& name);
  // Adds an event and returns it, so that the caller can add "args" to it until the next call. Both
  // ends are rounded alike, so that slices that follow each other still do. REQUIRES: the slices of
  // a thread nest or follow each other.
  nlohmann::json& Slice(int process, int thread, const std::string& name, const char* category,
                        absl::Time begin, absl::Time end);
  // Returns the whole file.
  nlohmann::json Take();

 private:
  void Name(const char* what, int process, int thread, const std::string& name);
  double Micros(absl::Time t) const;

  absl::Time begin_;
  nlohmann::json events_ = nlohmann::json::array();
  std::set<std::pair<int, int>> named_;
};

}  // namespace sluice
