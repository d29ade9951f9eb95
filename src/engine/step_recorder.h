// Records the last steps of an engine: phases, steps, and stages of the sequences that were alive.
// A steady step writes into rings and allocates nothing.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "src/engine/turn_trace.h"

namespace sluice {

// A copy of the record, each list in order of time.
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
    absl::Time end;  // InfiniteFuture: it is still in that stage
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

  // Returns the last `steps` steps, or as many as there are. Engine's thread.
  StepRecord Last(size_t steps) const;

 private:
  // A ring of the newest `capacity` elements that were pushed.
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
    // Element 0 is the oldest.
    const T& operator[](size_t i) const {
      return items_[items_.size() < capacity_ ? i : (next_ + i) % capacity_];
    }

   private:
    const size_t capacity_;
    std::vector<T> items_;
    size_t next_ = 0;
  };
  // A step takes at most a turn that launches it and one that reads it, each with a wait and two
  // phases inside.
  static constexpr size_t kPhasesPerStep = 8;
  static constexpr size_t kStages = 4096;  // x about 250 bytes

  Ring<StepRecord::Phase> phases_;
  Ring<TracedStep> steps_;
  Ring<StepRecord::Stage> stages_;                // stages that have ended
  std::map<SequenceId, StepRecord::Stage> open_;  // stages of sequences that are alive
  bool worked_ = false;                           // whether a phase came since the last turn
  absl::Time last_turn_ = absl::InfinitePast();   // end of the last turn that was kept
};

// Returns a record as a trace file (src/base/trace_events.h). It has a process for the engine
// (phases, steps, and the device's time in each step, placed so that it ends where the host saw the
// results) and one for sequences, with a thread for each.
nlohmann::json ToTraceEvents(const StepRecord& record);

}  // namespace sluice
