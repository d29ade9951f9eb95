// One seed: a node, its requests, and one thread in virtual time. The engine turns when a server's
// engine thread would, and the invariants are checked after every event.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/base/rng.h"
#include "src/device/sim/sim_clock.h"
#include "src/engine/engine.h"
#include "tests/sim/caller.h"
#include "tests/sim/node.h"
#include "tests/sim/pool_watch.h"
#include "tests/sim/scenario.h"
#include "tests/sim/sender.h"
#include "tests/sim/situations.h"

namespace sluice::sim {

// Returns the status's reason, or its code.
std::string ReasonOr(const absl::Status& status);

class World {
 public:
  // `trace`: print what happens. `counts` outlives the world.
  World(Scenario scenario, bool trace, SituationCounts* counts);
  ~World();
  // Runs the seed. Ends the process with a report if anything is wrong.
  void Run();
  // Returns a digest of everything that happened, traced or not. Equal seeds have equal digests.
  uint64_t digest() const { return digest_; }

  // ---- The actors call these ----
  const Scenario& scenario() const { return scenario_; }
  SimClock& clock() { return clock_; }
  Node& node() { return *node_; }
  Engine& engine() { return node_->engine(); }
  TransferTable& transfers() { return node_->transfers(); }
  bool draining() const { return draining_; }
  bool has_drained() const { return drains_ > 0; }
  // Returns when running requests must have ended; InfiniteFuture while not draining.
  absl::Time drain_deadline() const { return drain_deadline_; }
  void Note(Situation situation) { ++(*counts_)[static_cast<size_t>(situation)]; }
  template <typename... Args>
  void Trace(const Args&... args) {
    WriteTrace(absl::StrCat(args...));
  }
  // Reports what is wrong with a request, or (-1) with the node.
  template <typename... Args>
  [[noreturn]] void Fail(int request, const Args&... args) {
    FailWith(request, absl::StrCat(args...));
  }

 private:
  struct RequestActors {
    std::unique_ptr<Caller> caller;
    std::unique_ptr<Sender> sender;
  };
  void StartNode();
  void PlanHappenings();
  bool IsOver();
  void Drain(absl::Duration time);
  void Resume();

  // Runs a turn, as the actor that stands for the engine's thread.
  void Turn();
  void TurnAfter(absl::Duration delay);
  void TurnIfWoken();

  void CheckAlways();
  void CheckQuiet();  // called once the engine sleeps without a deadline
  void CheckSnapshot(const EngineSnapshot& snapshot);
  void Breach();  // commits the planted fault of this seed, if it is one of the world's

  // Returns whether a network or a constant made policy fluxion read a part of what has no place.
  bool ReadPartOutsideHbm() const;

  void WriteTrace(const std::string& line);
  [[noreturn]] void FailWith(int request, const std::string& what);

  const Scenario scenario_;
  const bool trace_;
  SituationCounts* const counts_;
  SplitMix64 random_;
  SimClock clock_;
  const absl::Time start_ = clock_.Now();
  std::unique_ptr<Node> node_;
  std::deque<PoolWatch> pools_;
  std::vector<RequestActors> requests_;
  uint64_t digest_ = 0;

  bool turn_is_due_ = false;
  Engine::Next next_;  // the thing that the engine waits for
  uint64_t turns_ = 0;
  size_t sleeps_ = 0;  // number of pending events that end a sleep of the engine
  int looks_ = 0;      // used by IsOver

  bool draining_ = false;
  absl::Time drain_deadline_ = absl::InfiniteFuture();
  int drains_ = 0;
  int drained_ = 0;     // drains that were notified that everything is idle
  Reservation leaked_;  // kept by Plant::kPageLeaked
};

}  // namespace sluice::sim
