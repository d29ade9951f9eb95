// Measures how much time a bench spends in each phase, and shows the current phase in one line on a
// terminal.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace sluice::bench {

// Not thread-safe: one thread uses it.
class RunClock {
 public:
  RunClock();
  ~RunClock();
  // Ends the current phase and begins another one. Phases of the same name add up; `detail` appears
  // only in the line on a terminal.
  void Begin(const std::string& phase, const std::string& detail = "");
  // Ends the current phase and clears the line.
  void Pause();

  // Phases are listed in the order in which they first began. The current phase is not included.
  std::string ToText() const;
  nlohmann::json ToJson() const;

 private:
  const bool terminal_;
  const absl::Time start_;
  std::string phase_;  // Empty: no phase is running.
  absl::Time begin_;
  std::vector<std::pair<std::string, absl::Duration>> phases_;
};

}  // namespace sluice::bench
