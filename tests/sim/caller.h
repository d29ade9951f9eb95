// The Generate leg of a simulated request: submits, reads its stream in its own way, cancels, and
// holds every token and the end against what the oracle and the sender say.
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
  // The sender's news.
  void Reserved();
  void Committed();

  // After a turn that began at `start`: whatever was due then has happened.
  void CheckAfterTurn(absl::Time start);
  // Times after which the engine must not sleep on: InfiniteFuture if there are none.
  absl::Time Due() const;
  // Why the engine, which sleeps with nothing under way, should have been woken for this one.
  const char* Stranded() const;
  // At the end of the seed.
  void CheckOver() const;
  bool alive() const { return submitted_ && !ended_; }
  bool accepted() const { return submitted_; }
  size_t emitted() const { return emitted_; }
  const std::string& name() const { return name_; }
  void EverythingWasCancelled();  // by Engine::CancelAll, now

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
  // The reader's side.
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
  std::optional<absl::Time> added_at_;  // the turn that took it from the inbox
  absl::Time deadline_ = absl::InfiniteFuture();
  std::optional<absl::Time> cancelled_at_;
  size_t emitted_ = 0;
  bool ended_ = false;

  size_t read_ = 0;
  bool end_read_ = false;
  bool read_is_due_ = false;
  bool paused_ = false;  // kPausing: it has had its pause
  bool parked_ = false;  // the engine found no room when it looked last
  bool was_parked_ = false;
  absl::Time last_read_;  // or the stream's start
};

}  // namespace sluice::sim
