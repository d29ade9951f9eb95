// Whether this node takes work: set by the main, read by every service. Thread-safe.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "src/base/error.h"

namespace sluice {

class Readiness {
 public:
  // A canary decode has succeeded.
  void SetReady() { state_.store(State::kReady); }
  // Final: what runs is finished, nothing new is taken.
  void SetDraining() { state_.store(State::kDraining); }

  bool ready() const { return state_.load() == State::kReady; }
  bool draining() const { return state_.load() == State::kDraining; }

  // UNAVAILABLE with reason DRAINING while draining.
  absl::Status CheckNotDraining() const {
    if (!draining()) return absl::OkStatus();
    return WithReason(absl::UnavailableError("the node is draining: use another one"), "DRAINING");
  }

 private:
  enum class State { kStarting, kReady, kDraining };
  std::atomic<State> state_ = State::kStarting;
};

}  // namespace sluice
