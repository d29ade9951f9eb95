// Whether this node takes work: one object per node, read by every service. Set by the main of a
// prefill node; of a decode node by its engine, which refuses by it, too. Thread-safe.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "src/base/error.h"

namespace sluice {

class Readiness {
 public:
  // A canary has succeeded.
  void SetReady() { ready_.store(true); }
  // While draining what runs is finished, and nothing new is taken.
  void SetDraining(bool draining) { draining_.store(draining); }

  bool ready() const { return ready_.load() && !draining(); }
  bool draining() const { return draining_.load(); }

  // UNAVAILABLE with reason DRAINING while draining.
  absl::Status CheckNotDraining() const {
    if (!draining()) return absl::OkStatus();
    return WithReason(absl::UnavailableError("the node is draining: use another one"), "DRAINING");
  }

 private:
  std::atomic<bool> ready_ = false;
  std::atomic<bool> draining_ = false;
};

}  // namespace sluice
