// The decode loop: owns the running batch. One thread calls Turn(); everything else reaches the
// engine through its inbox, so no other thread touches a sequence.
//
// A turn: drain the inbox, reap leases and deadlines, admit, plan, launch the next step, and only
// then take the results of the step before: the device always has work queued while the host emits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/strong_id.h"
#include "src/device/device.h"
#include "src/request/generator.h"
#include "src/request/request.h"

namespace sluice {

class AttentionPolicy;
class FinishRate;
class Metrics;
class Model;
class Readiness;
class TokenBytes;
class TransferTable;
class TurnTrace;

struct SequenceSnapshot {
  enum class State { kAwaitingTransfer, kWaiting, kRunning, kParked, kPreempted };
  std::string request_id;
  std::string transfer_id;
  State state = State::kWaiting;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  uint32_t max_tokens = 0;
  absl::Duration age;
};

// Where the engine's thread spends its time, summed since the engine was made. `turn` runs beside
// the device but for what it keeps the device waiting: the host's share of a step is turn / step.
struct StepTimes {
  uint64_t steps = 0;     // whose results were read
  absl::Duration step;    // wall time of those: from the results before (or its launch, if later)
  absl::Duration turn;    // all of Turn(), the next three included; waiting is not in it
  absl::Duration plan;    // which rows, and pages for their growth
  absl::Duration launch;  // upload of the rows, and enqueueing model and sampling
  absl::Duration emit;    // results to their streams
  // Of `step`: the forward pass and sampling, by the device's own clock.
  absl::Duration kernels;
};

struct EngineSnapshot {
  std::vector<SequenceSnapshot> sequences;
  StepTimes times;
  uint32_t running = 0;  // parked ones included
  uint32_t waiting = 0;  // awaiting their transfer, or room
  bool draining = false;
};

// Which prompts this node computes. One that was handed over may fail and be computed after all
// where the request brings it: the caller then waits for both, and sees the tokens it would have.
enum class LocalPrefill { kNever, kOnFailure, kAlways };

class Engine : public Generator {
 public:
  struct Options {
    uint32_t max_sequences = 32;
    uint32_t max_waiting = 1024;
    uint32_t max_context = 0;
    uint32_t chunk_tokens = 512;
    LocalPrefill local_prefill = LocalPrefill::kNever;
    uint64_t seed = 0;
    absl::Duration transfer_wait = absl::Seconds(60);
    absl::Duration slow_reader_timeout = absl::Seconds(30);
  };
  // Everything outlives the engine. `token_bytes` null: no stop strings.
  struct Parts {
    Device* device = nullptr;
    Model* model = nullptr;
    AttentionPolicy* policy = nullptr;
    TransferTable* transfers = nullptr;
    const TokenBytes* token_bytes = nullptr;
    Metrics* metrics = nullptr;
    Clock* clock = nullptr;
    Readiness* readiness = nullptr;     // null: the engine keeps its own
    FinishRate* finish_rate = nullptr;  // told of every end, asked for refusals; may be null
    TurnTrace* trace = nullptr;         // told of every phase; may be null
  };
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const Options& options, const Parts& parts);

  // ---- From any thread: Generator's, and ----

  // Gives a kept sequence back that no Generate has; whether there was one.
  virtual bool Forget(const std::string& sequence_id, const std::string& tenant) = 0;
  // `done` runs on the engine's thread within one step.
  virtual void Snapshot(std::function<void(EngineSnapshot)> done) = 0;
  // New requests are refused with UNAVAILABLE from now on, reason DRAINING. What is alive goes on
  // until `deadline` and then ends with `why`; what waits for a transfer that has not begun ends at
  // once. `idle` (may be null) runs on the engine's thread the next time that nothing runs or
  // waits. Again while draining: `deadline` and `why` are set anew.
  virtual void Drain(absl::Time deadline, absl::Status why, std::function<void()> idle) = 0;
  // Takes requests again; what is left of the time to drain is forgotten. Nothing if not draining.
  virtual void Resume() = 0;
  // Ends everything that is alive with `why`.
  virtual void CancelAll(absl::Status why) = 0;

  // ---- From the engine's one thread ----

  // What to wait for before the next turn.
  struct Next {
    enum class Kind { kNow, kEvent, kInbox } kind = Kind::kInbox;
    Event* event = nullptr;                     // kEvent
    absl::Time until = absl::InfiniteFuture();  // turn by then at the latest
  };
  virtual Next Turn() = 0;
  // Blocks until the inbox has something or Wake() was called (true), or until `until` or sooner
  // (false). A time that is past never blocks: a simulation only looks.
  virtual bool WaitForInbox(absl::Time until) = 0;
  virtual const StepTimes& times() const = 0;
};

// Runs an engine on a thread of its own until destroyed; cancels what is alive when it ends.
class EngineThread {
 public:
  explicit EngineThread(Engine* engine);
  ~EngineThread();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
