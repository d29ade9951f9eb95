// Keeps the last steps of an engine for whoever asks what it did: phases, steps, and stages of the
// sequences that were alive. In a steady step it writes into rings and allocates nothing.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "src/engine/turn_trace.h"

namespace sluice {

// A copy of what was kept, each list by time.
struct StepRecord {
  struct Phase {
    const char* name;
    absl::Time begin, end;
  };
  struct Stage {
    SequenceId sequence;
    std::string request_id;
    RequestTrace trace;
    SequenceStage stage;
    absl::Time begin;
    absl::Time end;  // InfiniteFuture: it is in it
  };
  std::vector<Phase> phases;
  std::vector<TracedStep> steps;
  std::vector<Stage> stages;
};

class StepRecorder : public TurnTrace {
 public:
  // REQUIRES: steps > 0. Takes about steps x 350 bytes, and 1 MiB for sequences.
  explicit StepRecorder(size_t steps);

  void Phase(const char* name, absl::Time begin, absl::Time end) override;
  void Step(const TracedStep& step) override;
  void Enter(SequenceId id, const Request& request, SequenceStage stage, absl::Time at) override;

  // The last `steps`, or as many as there are. Engine's thread.
  StepRecord Last(size_t steps) const;

 private:
  // The newest `capacity` of what was pushed.
  template <typename T>
  class Ring {
   public:
    explicit Ring(size_t capacity) : capacity_(capacity) { items_.reserve(capacity); }
    void Push(T item) {
      if (items_.size() < capacity_) {
        items_.push_back(std::move(item));
      } else {
        items_[next_] = std::move(item);
      }
      next_ = (next_ + 1) % capacity_;
    }
    size_t size() const { return items_.size(); }
    // The oldest is 0.
    const T& operator[](size_t i) const {
      return items_[items_.size() < capacity_ ? i : (next_ + i) % capacity_];
    }

   private:
    const size_t capacity_;
    std::vector<T> items_;
    size_t next_ = 0;
  };
  // A step takes a turn that launches it and one that reads it at most, each with a wait and two
  // phases inside.
  static constexpr size_t kPhasesPerStep = 8;
  static constexpr size_t kStages = 4096;  // x about 250 bytes

  Ring<StepRecord::Phase> phases_;
  Ring<TracedStep> steps_;
  Ring<StepRecord::Stage> stages_;                // that have ended
  std::map<SequenceId, StepRecord::Stage> open_;  // of those alive
  bool worked_ = false;                           // a phase came since the last turn
  absl::Time last_turn_ = absl::InfinitePast();   // the end of the last one that was kept
};

// The file of a record (src/base/trace_events.h): a process for the engine (phases, steps, and the
// device's time in each, laid so that it ends where the host saw the results), and one for
// sequences, each a thread.
nlohmann::json ToTraceEvents(const StepRecord& record);

}  // namespace sluice
