// Where a bench's time goes, phase by phase, and on a terminal a line that says where it is.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace sluice::bench {

// One thread.
class RunClock {
 public:
  RunClock();
  ~RunClock();
  // Ends the phase before. Phases of one name add up; `detail` is for the line on a terminal alone.
  void Begin(const std::string& phase, const std::string& detail = "");
  // Ends the last phase and clears the line.
  void Pause();

  // By first begin; the phase under way is not in it.
  std::string ToText() const;
  nlohmann::json ToJson() const;

 private:
  const bool terminal_;
  const absl::Time start_;
  std::string phase_;  // empty: none
  absl::Time begin_;
  std::vector<std::pair<std::string, absl::Duration>> phases_;
};

}  // namespace sluice::bench
