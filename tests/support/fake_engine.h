// An engine for tests of the services above it.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "src/engine/engine.h"

namespace sluice {

// An engine whose sequences emit what the test tells them to. Like the real one it gives each sink
// one Finish, and calls it from one thread at a time.
class FakeEngine : public Engine {
 public:
  absl::StatusOr<SequenceId> Submit(Request request) override {
    absl::MutexLock lock(&mutex_);
    if (!refusal.ok()) return refusal;
    const std::string id = request.request_id;
    if (!alive_.emplace(id, std::move(request)).second) {
      return absl::AlreadyExistsError("a sequence of this name is alive");
    }
    names_.push_back(id);
    return SequenceId(names_.size() - 1);
  }
  void Cancel(SequenceId id, absl::Status why) override {
    std::string name;
    {
      absl::MutexLock lock(&mutex_);
      name = names_.at(id.value());
    }
    CancelRequest(name, std::move(why), [](bool) {});
  }
  void CancelRequest(const std::string& id, absl::Status why,
                     std::function<void(bool)> done) override {
    FinishInfo info;
    info.status = why;
    const bool found = Finish(id, info);
    {
      absl::MutexLock lock(&mutex_);
      cancelled_with.push_back(why);
    }
    done(found);
  }
  bool Forget(const std::string&, const std::string&) override { return false; }
  void Snapshot(std::function<void(EngineSnapshot)> done) override { done({}); }
  void Drain(absl::Time, absl::Status, std::function<void()>) override {}
  void Resume() override {}
  void CancelAll(absl::Status) override {}
  void Wake() override { ++wakes; }
  Next Turn() override { return {}; }
  bool WaitForInbox(absl::Time) override { return false; }
  const StepTimes& times() const override { return times_; }

  // ---- The test's side, which plays the engine's thread ----
  Request WaitForRequest() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](FakeEngine* self) { return !self->alive_.empty(); }, this));
    return alive_.begin()->second;
  }
  bool Finish(const std::string& id, FinishInfo info) {
    absl::MutexLock engine(&engine_thread_);
    std::shared_ptr<TokenSink> sink;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = alive_.find(id);
      if (found == alive_.end()) return false;
      sink = found->second.sink;
      alive_.erase(found);
    }
    sink->Finish(std::move(info));
    return true;
  }
  // Returns false if the sequence has ended or its sink is full.
  bool Emit(const std::string& id, int32_t token) {
    absl::MutexLock engine(&engine_thread_);
    std::shared_ptr<TokenSink> sink;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = alive_.find(id);
      if (found == alive_.end()) return false;
      sink = found->second.sink;
    }
    if (!sink->HasRoom(1)) return false;
    sink->Emit({token, {}, {}});
    return true;
  }
  bool Alive() {
    absl::MutexLock lock(&mutex_);
    return !alive_.empty();
  }
  absl::Status CancelledWith() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](FakeEngine* self) { return !self->cancelled_with.empty(); }, this));
    return cancelled_with.front();
  }

  absl::Status refusal;
  std::atomic<int> wakes = 0;

 private:
  const StepTimes times_;
  absl::Mutex engine_thread_;
  absl::Mutex mutex_;
  std::map<std::string, Request> alive_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> names_ ABSL_GUARDED_BY(mutex_);  // by SequenceId
  std::vector<absl::Status> cancelled_with ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
