// A file that chrome://tracing and ui.perfetto.dev open, event by event: Trace Event Format,
// "traceEvents" of complete events ("X") in microseconds, and the names of processes and threads.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace sluice {

class TraceEvents {
 public:
  // `begin` is 0 in the processes named from here on.
  void NameProcess(int process, const std::string& name, absl::Time begin);
  // Again: nothing.
  void NameThread(int process, int thread, const std::string& name);
  // Both ends are rounded alike, so that what follows each other still does; the caller sees to it
  // that slices of a thread nest or follow each other. The event, to add "args" to; until the next
  // call.
  nlohmann::json& Slice(int process, int thread, const std::string& name, const char* category,
                        absl::Time begin, absl::Time end);
  // The whole file.
  nlohmann::json Take();

 private:
  void Name(const char* what, int process, int thread, const std::string& name);
  double Micros(absl::Time t) const;

  absl::Time begin_;
  nlohmann::json events_ = nlohmann::json::array();
  std::set<std::pair<int, int>> named_;
};

}  // namespace sluice
