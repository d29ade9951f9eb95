// Where functions run: on one named thread in production, under the caller's hand in tests and in
// the simulation. What is built on an Executor and a Clock starts no thread of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/manual_clock.h"

namespace sluice {

// Runs functions one at a time, ordered by the time at which they are due and, among equals, by the
// order in which they were handed in. Post() means "due now", so a timed function that is overdue
// runs before one posted later. Any thread may call either, the functions themselves too.
class Executor {
 public:
  using Function = absl::AnyInvocable<void()>;

  virtual ~Executor() = default;
  virtual void Post(Function function) = 0;
  // `function` runs no earlier than `when`; a time that has passed means now.
  virtual void PostAt(absl::Time when, Function function) = 0;
};

// One thread, named `name` (its first 15 characters) for debuggers and profilers. Destruction runs
// what is due by then, destroys the rest unrun, and joins; functions handed in meanwhile are
// destroyed unrun too. REQUIRES: `clock` runs by itself (RealClock()) and outlives the executor;
// the executor is not destroyed from its own thread.
std::unique_ptr<Executor> NewThreadExecutor(std::string name, Clock* clock);

namespace internal {

// A heap of functions by (time, order of arrival). Not thread-safe.
class TimedQueue {
 public:
  void Push(absl::Time when, Executor::Function function);
  // The first function due at `now`, or nothing.
  std::optional<Executor::Function> PopDue(absl::Time now);
  // When the next one is due; InfiniteFuture when empty.
  absl::Time NextTime() const;
  size_t size() const { return heap_.size(); }

 private:
  struct Entry {
    absl::Time when;
    uint64_t order;
    Executor::Function function;
  };
  static bool Later(const Entry& a, const Entry& b);

  std::vector<Entry> heap_;
  uint64_t next_order_ = 0;
};

}  // namespace internal

// Runs nothing until it is told to: for single-threaded tests and the simulation. Not thread-safe.
class ManualExecutor : public Executor {
 public:
  // REQUIRES: `clock` outlives the executor.
  explicit ManualExecutor(ManualClock* clock) : clock_(clock) {}

  void Post(Function function) override;
  void PostAt(absl::Time when, Function function) override;

  // Runs the next function that is due; false if there is none.
  bool RunOne();
  // Runs what is due, and what that makes due, until nothing is; returns how many ran.
  size_t RunDue();
  // Moves the clock to `clock->Now() + duration`, stopping at each time at which something is due
  // to run it there; returns how many ran.
  size_t Advance(absl::Duration duration);
  // Functions that have not run.
  size_t pending() const { return queue_.size(); }

 private:
  ManualClock* const clock_;
  internal::TimedQueue queue_;
};

}  // namespace sluice
