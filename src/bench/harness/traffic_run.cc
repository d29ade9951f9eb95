#include "src/bench/harness/traffic_run.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/engine_session.h"

namespace sluice::bench {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(5);  // Maximum time to wait for all tokens.
constexpr size_t kAfterJump = 3;

// Keeps the time of every step. Owned by the engine's thread.
class StepWatch : public TurnTrace {
 public:
  struct Timed {
    absl::Time begin, end;
    int32_t sequences = 0;
    double seconds() const { return absl::ToDoubleSeconds(end - begin); }
  };
  void Phase(const char*, absl::Time, absl::Time) override {}
  void Step(const TracedStep& step) override {
    steps_.push_back({step.begin, step.end, step.sequences});
  }
  void Enter(SequenceId, const Request&, SequenceStage, absl::Time) override {}
  const std::vector<Timed>& steps() const { return steps_; }

 private:
  std::vector<Timed> steps_;
};

class Traffic {
 public:
  Traffic(const EngineRunOptions& options, const std::vector<TrafficSequence>& sequences, int jump)
      : options_(options), sequences_(sequences), jump_(jump), states_(sequences.size()) {
    options_.trace = &watch_;
    options_.batch = static_cast<int>(sequences.size());
  }

  absl::StatusOr<TrafficRun> Run(int slots, Device* device, Model* model, PagePool* hbm,
                                 AttentionPolicy* policy) {
    SLUICE_CHECK(options_.contexts != nullptr && sequences_[0].after == 0);
    SLUICE_ASSIGN_OR_RETURN(session_,
                            EngineSession::Create(options_, slots, device, model, hbm, policy));
    SLUICE_RETURN_IF_ERROR(session_->HandOverAll(
        sequences_.size(),
        [this](size_t i, ContextReader& reader) { return HandOver(i, reader); }));
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].after == 0) SLUICE_RETURN_IF_ERROR(Submit(i));
    }
    SLUICE_RETURN_IF_ERROR(AwaitFirst(slots));
    opened_ = absl::Now();
    session_->Open();
    SLUICE_RETURN_IF_ERROR(AwaitAll());
    session_->Stop();
    return Result();
  }

 private:
  struct State {
    std::string transfer;
    std::shared_ptr<CountingSink> sink;
    absl::Time submitted;
    // Owned by the engine's thread until the sink's end.
    std::vector<absl::Time> tokens;
    std::vector<size_t> jumps;  // Numbers of the steps in which it jumped.
  };

  // Sequences that are submitted later are in DRAM before the first token, so that what they cost
  // is their warm-up and not their transfer.
  absl::Status HandOver(size_t index, ContextReader& reader) {
    const TrafficSequence& of = sequences_[index];
    const Context& context = (*options_.contexts)[of.context % options_.contexts->size()];
    SLUICE_ASSIGN_OR_RETURN(states_[index].transfer,
                            session_->HandOver(&context, of.tokens, reader));
    return absl::OkStatus();
  }

  absl::Status Submit(size_t index) {
    State& state = states_[index];
    Request request;
    request.request_id = absl::StrCat("traffic-", index);
    request.handoff.transfer_id = state.transfer;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = static_cast<uint32_t>(sequences_[index].tokens);
    request.sampling.ignore_eos = true;
    state.sink = std::make_shared<CountingSink>(
        session_->open(), [this, index](const OutputToken& token, int64_t count) {
          State& of = states_[index];
          of.tokens.push_back(absl::Now());
          // Tokens come before their step's report.
          if (jump_ > 0 && token.id % jump_ == 1) of.jumps.push_back(watch_.steps().size());
          if (index == 0) first_tokens_.store(count, std::memory_order_release);
        });
    request.sink = state.sink;
    state.submitted = absl::Now();
    return session_->engine().Submit(std::move(request)).status();
  }

  // Waits until the first sequences are in the batch, with their caches.
  absl::Status AwaitFirst(int slots) {
    const auto wanted = std::count_if(sequences_.begin(), sequences_.end(),
                                      [](const TrafficSequence& s) { return s.after == 0; });
    StallWatch watch(options_.patience);
    for (auto now = session_->AdmittedNow(); !now.Decode(static_cast<int>(wanted), slots);
         now = session_->AdmittedNow()) {
      if (watch.Stalled(now.progress())) {
        return absl::ResourceExhaustedError(
            absl::StrCat("only ", now.running, " of the first ", wanted,
                         " sequences were admitted: lower --batches"));
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return absl::OkStatus();
  }

  // Submits the later sequences in their time, and waits for the end of all.
  absl::Status AwaitAll() {
    const absl::Time give_up = absl::Now() + kPatience;
    for (bool ended = false; !ended; absl::SleepFor(absl::Milliseconds(1))) {
      ended = true;
      for (size_t i = 0; i < sequences_.size(); ++i) {
        State& state = states_[i];
        if (state.sink == nullptr && states_[0].sink->ended()) {
          return absl::InternalError("the first sequence ended before the others were submitted");
        }
        if (state.sink == nullptr &&
            first_tokens_.load(std::memory_order_acquire) >= sequences_[i].after) {
          SLUICE_RETURN_IF_ERROR(Submit(i));
        }
        if (state.sink == nullptr || !state.sink->ended()) {
          ended = false;
        } else if (!state.sink->status().ok()) {
          return state.sink->status();
        }
      }
      if (absl::Now() > give_up) {
        return absl::DeadlineExceededError("the sequences did not end in time");
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<TrafficRun> Result() const {
    const std::vector<StepWatch::Timed>& steps = watch_.steps();
    const size_t first_measured = FirstMeasured();
    if (steps.size() <= first_measured) return absl::InternalError("there were too few steps");
    TrafficRun run;
    run.begin = steps[first_measured].begin;
    run.end = steps.back().end;
    int64_t tokens = 0;
    for (size_t i = first_measured; i < steps.size(); ++i) {
      run.steps.push_back(steps[i].seconds());
      tokens += steps[i].sequences;
      if (BesideArrival(steps[i])) run.beside_arrivals.push_back(steps[i].seconds());
    }
    run.tokens_per_second =
        static_cast<double>(tokens) / absl::ToDoubleSeconds(run.end - run.begin);
    for (const State& state : states_) {
      for (size_t i = 1; i < state.tokens.size(); ++i) {
        if (state.tokens[i - 1] < run.begin) continue;
        run.gaps.push_back(absl::ToDoubleSeconds(state.tokens[i] - state.tokens[i - 1]));
      }
    }
    AddJumps(first_measured, &run);
    return run;
  }

  // Returns the number of the first step that is measured. Before the first sequences decode there
  // were steps with the last rows of their prompts, which made the first token of each.
  size_t FirstMeasured() const {
    const std::vector<StepWatch::Timed>& steps = watch_.steps();
    const auto opened = std::find_if(steps.begin(), steps.end(),
                                     [this](const auto& step) { return step.begin >= opened_; });
    return static_cast<size_t>(opened - steps.begin()) + kEngineWarmUpTokens - 1;
  }

  bool BesideArrival(const StepWatch::Timed& step) const {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const State& state = states_[i];
      if (sequences_[i].after == 0 || state.tokens.empty()) continue;
      if (step.end > state.submitted && step.begin < state.tokens.front()) return true;
    }
    return false;
  }

  void AddJumps(size_t first_measured, TrafficRun* run) const {
    std::vector<size_t> at;
    for (const State& state : states_) at.insert(at.end(), state.jumps.begin(), state.jumps.end());
    std::sort(at.begin(), at.end());
    at.erase(std::unique(at.begin(), at.end()), at.end());
    const std::vector<StepWatch::Timed>& steps = watch_.steps();
    for (const size_t jump : at) {
      if (jump < first_measured || jump >= steps.size()) continue;
      run->jumps.push_back(steps[jump].seconds());
      for (size_t i = jump + 1; i <= jump + kAfterJump && i < steps.size(); ++i) {
        run->after_jumps.push_back(steps[i].seconds());
      }
    }
  }

  EngineRunOptions options_;
  const std::vector<TrafficSequence>& sequences_;
  const int jump_;
  absl::Time opened_;
  std::atomic<int64_t> first_tokens_{0};
  StepWatch watch_;
  std::vector<State> states_;
  std::unique_ptr<EngineSession> session_;
};

}  // namespace

absl::StatusOr<TrafficRun> RunTraffic(const EngineRunOptions& options,
                                      const std::vector<TrafficSequence>& sequences, int jump,
                                      int slots, Device* device, Model* model, PagePool* hbm,
                                      AttentionPolicy* policy) {
  return Traffic(options, sequences, jump).Run(slots, device, model, hbm, policy);
}

}  // namespace sluice::bench
