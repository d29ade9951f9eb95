// The engine: the decode loop, which owns the running batch. One thread calls Turn(); everything
// else reaches the engine through its inbox, so no other thread touches a sequence.
//
// A turn drains the inbox, reaps leases and deadlines, admits, plans, launches the next step, and
// only then takes the results of the step before: so the device always has work queued while the
// host emits.
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
class BatchLog;
class Drafter;
class FinishRate;
class Metrics;
class Model;
class RankRows;
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

// The time that the engine's thread spends, by part, summed since the engine was made. `turn`
// overlaps with the device's work, except where the device waits for it: the host's share of a step
// is turn / step.
struct StepTimes {
  uint64_t steps = 0;  // steps whose results were read
  // wall time of those steps: from the results of the step before (or the launch, if later)
  absl::Duration step;
  absl::Duration turn;    // all of Turn(), including the next three; waiting is not included
  absl::Duration plan;    // choosing rows, and pages for their growth
  absl::Duration launch;  // uploading the rows, and enqueueing model and sampling
  absl::Duration emit;    // passing results to their streams
  // The part of `step` that is the forward pass and sampling, by the device's own clock.
  absl::Duration kernels;
};

struct EngineSnapshot {
  std::vector<SequenceSnapshot> sequences;
  StepTimes times;
  uint32_t running = 0;  // including parked ones
  // the running ones whose prompts are computed, so that their working sets are made or being made
  uint32_t prompts_ended = 0;
  uint32_t waiting = 0;  // awaiting their transfer or capacity
  bool draining = false;
};

// Says which prompts this node computes. Under kOnFailure a handed-over prompt whose transfer fails
// is computed here if the request brings it: the caller then waits for both, and sees the tokens it
// would have seen.
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
    // Maximum drafts of a sequence in a step, where there is a drafter.
    uint32_t draft_tokens = 0;
    // Fewer of them where they make steps longer than they are worth (draft_limit.h).
    bool limit_drafts = false;
    int halves_from = 0;  // BatchState::Options::halves_from
    absl::Duration transfer_wait = absl::Seconds(60);
    absl::Duration slow_reader_timeout = absl::Seconds(30);
  };
  // The parts that the engine uses; all of them outlive it. With `token_bytes` null there are no
  // stop strings.
  struct Parts {
    Device* device = nullptr;
    Model* model = nullptr;
    AttentionPolicy* policy = nullptr;
    TransferTable* transfers = nullptr;
    const TokenBytes* token_bytes = nullptr;
    Metrics* metrics = nullptr;
    Clock* clock = nullptr;
    Readiness* readiness = nullptr;     // null: the engine keeps its own
    FinishRate* finish_rate = nullptr;  // notified of every end, asked for refusals; may be null
    TurnTrace* trace = nullptr;         // notified of every phase; may be null
    Drafter* drafter = nullptr;         // null: no speculation
    BatchLog* batch_log = nullptr;  // told what joins the batch and which steps run; may be null
    RankRows* rank_rows = nullptr;  // not null: each rank has sequences of its own
  };
  // Returns INVALID_ARGUMENT if there is a drafter and the policy cannot verify drafts.
  // REQUIRES: the model's steps have max_sequences * (1 + draft_tokens) rows and logits at least.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const Options& options, const Parts& parts);

  // ---- Any thread may call these, and Generator's functions ----

  // Gives a kept sequence back that no Generate uses. Returns whether there was one.
  virtual bool Forget(const std::string& sequence_id, const std::string& tenant) = 0;
  // Takes a snapshot; `done` runs on the engine's thread within one step.
  virtual void Snapshot(std::function<void(EngineSnapshot)> done) = 0;
  // Starts to drain. New requests are refused from now on with UNAVAILABLE, reason DRAINING.
  // Requests in progress go on until `deadline` and then end with `why`; those that wait for a
  // transfer that has not begun end at once. `idle` (may be null) runs on the engine's thread the
  // next time that nothing runs or waits. A second call while draining replaces `deadline` and
  // `why`.
  virtual void Drain(absl::Time deadline, absl::Status why, std::function<void()> idle) = 0;
  // Accepts requests again and drops the drain's deadline. Does nothing if the engine is not
  // draining.
  virtual void Resume() = 0;
  // Ends every request in progress with `why`.
  virtual void CancelAll(absl::Status why) = 0;

  // ---- Only the engine's thread may call these ----

  // The thing to wait for before the next turn.
  struct Next {
    enum class Kind { kNow, kEvent, kInbox } kind = Kind::kInbox;
    Event* event = nullptr;                     // set for kEvent
    absl::Time until = absl::InfiniteFuture();  // latest time of the next turn
  };
  virtual Next Turn() = 0;
  // Blocks until the inbox has something or Wake() was called, and returns true; or returns false
  // at `until` or sooner. It never blocks if `until` is past, so that a simulation only polls.
  virtual bool WaitForInbox(absl::Time until) = 0;
  virtual const StepTimes& times() const = 0;
};

// Runs an engine on a thread of its own until destroyed. The destructor cancels the requests in
// progress.
class EngineThread {
 public:
  explicit EngineThread(Engine* engine);
  ~EngineThread();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
