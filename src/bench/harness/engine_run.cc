#include "src/bench/harness/engine_run.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/engine_session.h"
#include "src/engine/engine.h"

namespace sluice::bench {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(5);  // Maximum time to wait for tokens.

class EngineRun {
 public:
  EngineRun(const EngineRunOptions& options, Device* device, Model* model)
      : options_(options), device_(device), model_(model) {}

  absl::StatusOr<std::vector<EngineWindow>> Run(int slots, PagePool* hbm, AttentionPolicy* policy) {
    total_ = options_.context + EngineTokens(options_);
    SLUICE_CHECK(total_ <= model_->max_context());
    SLUICE_ASSIGN_OR_RETURN(session_,
                            EngineSession::Create(options_, slots, device_, model_, hbm, policy));
    marks_->times.resize(static_cast<size_t>(options_.windows) + 1);
    marks_->taken.resize(marks_->times.size());
    marks_->tokens.reserve(static_cast<size_t>(options_.windows * options_.steps) + 1);
    // All sequences are in the batch, with their working sets, before the first one decodes, so
    // that they stay equally long and nothing but steps is measured.
    SLUICE_RETURN_IF_ERROR(
        session_->HandOverAll(static_cast<size_t>(options_.batch),
                              [this](size_t i, ContextReader& r) { return Begin(i, r); }));
    StallWatch watch(options_.patience);
    for (auto now = session_->AdmittedNow(); !now.Decode(batch(), slots);
         now = session_->AdmittedNow()) {
      if (watch.Stalled(now.progress())) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "only ", now.running, " of ", batch(), " sequences were admitted, and no other in ",
            absl::FormatDuration(options_.patience),
            ": they do not fit together; lower --max-batch or --batches"));
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    const absl::Time give_up = absl::Now() + kPatience;
    session_->Open();
    while (!marks_->all.WaitForNotificationWithTimeout(absl::Milliseconds(20))) {
      if (sinks_.back()->ended() && !marks_->all.HasBeenNotified()) {
        const absl::Status& why = sinks_.back()->status();
        return absl::InternalError(
            absl::StrCat("a sequence ended before its time: ",
                         why.ok() ? "it has all its tokens" : why.message()));
      }
      if (absl::Now() > give_up) return absl::DeadlineExceededError("no tokens came");
    }
    std::vector<EngineWindow> windows;
    for (size_t i = 1; i < marks_->times.size(); ++i) {
      const StepTimes &last = marks_->times[i - 1], &now = marks_->times[i];
      const auto steps = static_cast<double>(now.steps - last.steps);
      if (now.steps == last.steps) return absl::DeadlineExceededError("the engine does not step");
      windows.push_back({now.steps - last.steps,
                         absl::ToDoubleSeconds(now.step - last.step) / steps,
                         absl::ToDoubleSeconds(now.kernels - last.kernels) / steps,
                         absl::ToDoubleSeconds(now.turn - last.turn) / steps, marks_->taken[i - 1],
                         marks_->taken[i], marks_->Gaps(i - 1, options_.steps)});
    }
    if (!options_.to_the_end) session_->engine().CancelAll(absl::CancelledError("measured"));
    for (const auto& sink : sinks_) sink->WaitForEnd();
    session_->Stop();
    return windows;
  }

 private:
  // Hands over a sequence and submits its Generate. Waits while DRAM is full: caches that a policy
  // does not keep there leave it once their sequence is admitted.
  absl::Status Begin(size_t index, ContextReader& reader) {
    StallWatch watch(options_.patience);
    for (;;) {
      const Context* const given = options_.contexts == nullptr
                                       ? nullptr
                                       : &(*options_.contexts)[index % options_.contexts->size()];
      const absl::StatusOr<std::string> transfer =
          session_->HandOver(given, total_ - options_.context, reader, LastOfPrompt(index));
      if (transfer.ok()) {
        absl::MutexLock lock(&submit_mutex_);
        return session_->engine().Submit(RequestFor(index, *transfer)).status();
      }
      if (!absl::IsResourceExhausted(transfer.status())) return transfer.status();
      if (watch.Stalled(session_->landed())) {
        absl::MutexLock lock(&submit_mutex_);
        return absl::ResourceExhaustedError(absl::StrCat(
            "DRAM took in ", sinks_.size(), " of ", batch(), " sequences, and no other in ",
            absl::FormatDuration(options_.patience), " (", transfer.status().message(),
            "): raise --dram-bytes, or lower --max-batch or --batches"));
      }
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  int32_t LastOfPrompt(size_t index) const {
    if (!options_.distinct_prompts) return 1;
    return static_cast<int32_t>(index % static_cast<size_t>(model_->config().vocab_size));
  }

  // Returns the Generate for a transfer; the one for the last transfer records the times.
  Request RequestFor(size_t index, const std::string& transfer) {
    Request request;
    request.request_id = absl::StrCat("bench-", sinks_.size());
    request.handoff.transfer_id = transfer;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = static_cast<uint32_t>(total_ - options_.context);
    request.sampling.ignore_eos = true;
    const bool youngest = sinks_.size() + 1 == static_cast<size_t>(options_.batch);
    CountingSink::OnToken note;
    if (youngest || options_.on_token != nullptr) {
      note = [this, index, youngest](const OutputToken& token, int64_t tokens) {
        if (options_.on_token != nullptr) options_.on_token(index, token);
        if (youngest) NoteTimes(tokens);
      };
    }
    sinks_.push_back(std::make_shared<CountingSink>(session_->open(), std::move(note)));
    request.sink = sinks_.back();
    return request;
  }

  int batch() const { return options_.batch; }

  // Records the engine's times where a window begins or ends. Called for the youngest sequence.
  void NoteTimes(int64_t tokens) {
    const int64_t past = tokens - kEngineWarmUpTokens;
    if (tokens == options_.first_tokens && options_.on_first != nullptr) {
      session_->engine().Snapshot(
          [on_first = options_.on_first](const EngineSnapshot&) { on_first(); });
    }
    if (past >= 0 && past <= int64_t{options_.windows} * options_.steps) {
      marks_->tokens.push_back(absl::Now());
    }
    if (past == -1 && options_.on_edge != nullptr) {
      session_->engine().Snapshot(
          [on_edge = options_.on_edge](const EngineSnapshot&) { on_edge(false); });
    }
    if (past < 0 || past % options_.steps != 0) return;
    const auto mark = static_cast<size_t>(past / options_.steps);
    if (mark >= marks_->times.size()) return;
    // The callback runs in the next turn, perhaps after this object's end, so the marks are shared.
    session_->engine().Snapshot([marks = marks_, mark, on_edge = options_.on_edge,
                                 on_mark = options_.on_mark](const EngineSnapshot& snapshot) {
      marks->times[mark] = snapshot.times;
      marks->taken[mark] = absl::Now();
      if (on_mark != nullptr) on_mark(mark);
      if (mark + 1 < marks->times.size()) return;
      if (on_edge != nullptr) on_edge(true);
      marks->all.Notify();
    });
  }

  struct Marks {
    std::vector<StepTimes> times;  // Owned by the engine's thread until `all`.
    std::vector<absl::Time> taken;
    std::vector<absl::Time> tokens;  // Arrival times, from the begin of the first window on.
    absl::Notification all;
    // Returns the gaps between the tokens of a window. REQUIRES: `all`.
    std::vector<double> Gaps(size_t window, int steps) const {
      std::vector<double> gaps;
      const size_t first = window * static_cast<size_t>(steps) + 1;
      for (size_t i = first; i < first + static_cast<size_t>(steps) && i < tokens.size(); ++i) {
        gaps.push_back(absl::ToDoubleSeconds(tokens[i] - tokens[i - 1]));
      }
      return gaps;
    }
  };
  const EngineRunOptions options_;
  Device* const device_;
  Model* const model_;
  int total_ = 0;  // Tokens of a sequence at its end.
  std::shared_ptr<Marks> marks_ = std::make_shared<Marks>();
  // Held over RequestFor and Submit, so that sinks are in the order of submission.
  absl::Mutex submit_mutex_;
  std::vector<std::shared_ptr<CountingSink>> sinks_;
  std::unique_ptr<EngineSession> session_;
};

}  // namespace

int EngineTokens(const EngineRunOptions& options) {
  // Covers the steps in flight when the last window ends, and those until the engine is told to
  // stop.
  constexpr int kSpare = 64;
  return kEngineWarmUpTokens + (options.windows + 1) * options.steps + kSpare;
}

absl::StatusOr<std::vector<EngineWindow>> RunEngine(const EngineRunOptions& options, int slots,
                                                    Device* device, Model* model, PagePool* hbm,
                                                    AttentionPolicy* policy) {
  return EngineRun(options, device, model).Run(slots, hbm, policy);
}

}  // namespace sluice::bench
