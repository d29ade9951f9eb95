// The Generate leg of a simulated request. It submits, reads its stream in its own way, cancels,
// and checks every token and the end against the oracle and the sender.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/rng.h"
#include "src/engine/engine.h"
#include "src/request/token_sink.h"
#include "tests/sim/scenario.h"

namespace sluice::sim {

class Sender;
class World;

class Caller {
 public:
  // `sender` null: nothing is handed over.
  Caller(World* world, const RequestSpec& request, Sender* sender);
  void Start();
  // Called by the sender.
  void Reserved();
  void Committed();

  // Checks, after a turn that began at `start`, that whatever was due then has happened.
  void CheckAfterTurn(absl::Time start);
  // Returns the time beyond which the engine must not sleep; InfiniteFuture if there is none.
  absl::Time Due() const;
  // Returns why the engine, which sleeps with nothing under way, should have been woken for this
  // request; null if it should not.
  const char* Stranded() const;
  // Checks, at the end of the seed, that everything is over.
  void CheckOver() const;
  bool alive() const { return submitted_ && !ended_; }
  bool accepted() const { return submitted_; }
  size_t emitted() const { return emitted_; }
  const std::string& name() const { return name_; }
  void EverythingWasCancelled();  // Called when Engine::CancelAll has cancelled it, now.

 private:
  class Sink;
  void Submit();
  void SubmitAgain();
  Request MakeRequest() const;
  void Cancel();
  // The engine's side of the stream.
  void Emitted(const OutputToken& token);
  void Ended(const FinishInfo& info);
  void CheckError(const FinishInfo& info);
  // Checks from which token on the policy approximated, and that it did not before.
  void CheckExact(const FinishInfo& info);
  void CheckDrafts(const FinishInfo& info);
  // The reader's side of the stream.
  void ReadAfter(absl::Duration delay);
  void Read();
  [[noreturn]] void Fail(const std::string& why) const;

  World* const world_;
  const RequestSpec& request_;
  Sender* const sender_;
  const std::string name_;
  SplitMix64 random_;
  std::shared_ptr<Sink> sink_;

  SequenceId id_;
  bool submitted_ = false;
  int attempts_ = 0;
  absl::Time submitted_at_;
  std::optional<absl::Time> added_at_;  // time of the turn that took it from the inbox
  absl::Time deadline_ = absl::InfiniteFuture();
  std::optional<absl::Time> cancelled_at_;
  size_t emitted_ = 0;
  bool ended_ = false;

  size_t read_ = 0;
  bool end_read_ = false;
  bool read_is_due_ = false;
  bool paused_ = false;  // in kPausing: it has had its pause
  bool parked_ = false;  // the stream was full when the engine last asked
  bool was_parked_ = false;
  absl::Time last_read_;  // time of the last read, or of the stream's start
};

}  // namespace sluice::sim
