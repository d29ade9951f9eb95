#include "src/bench/report/run_clock.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace sluice::bench {

RunClock::RunClock() : terminal_(isatty(STDERR_FILENO) != 0), start_(absl::Now()) {}
RunClock::~RunClock() { Pause(); }

void RunClock::Begin(const std::string& phase, const std::string& detail) {
  Pause();
  phase_ = phase;
  begin_ = absl::Now();
  if (!terminal_) return;
  std::fprintf(stderr, "\r\033[K%4.0f s  %s%s%s", absl::ToDoubleSeconds(begin_ - start_),
               phase.c_str(), detail.empty() ? "" : ": ", detail.c_str());
  std::fflush(stderr);
}

void RunClock::Pause() {
  if (phase_.empty()) return;
  const absl::Duration length = absl::Now() - begin_;
  const auto same = std::find_if(phases_.begin(), phases_.end(),
                                 [&](const auto& phase) { return phase.first == phase_; });
  if (same == phases_.end()) {
    phases_.emplace_back(phase_, length);
  } else {
    same->second += length;
  }
  phase_.clear();
  if (!terminal_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

std::string RunClock::ToText() const {
  std::string out = absl::StrFormat("time: %.1f s", absl::ToDoubleSeconds(absl::Now() - start_));
  const char* separator = ": ";
  for (const auto& [name, length] : phases_) {
    absl::StrAppendFormat(&out, "%s%s %.1f", separator, name, absl::ToDoubleSeconds(length));
    separator = ", ";
  }
  return absl::StrCat(out, "\n");
}

nlohmann::json RunClock::ToJson() const {
  nlohmann::json out = nlohmann::json::object();
  for (const auto& [name, length] : phases_) out[name] = absl::ToDoubleSeconds(length);
  return out;
}

}  // namespace sluice::bench
