// A prefill node as a Generator: its sequences are prompts that are computed and held for a decode
// node, and end after one token with where they are held (FinishInfo::source). What is held stays a
// request's own: to cancel it by its name gives the caches back, though the sequence has ended, for
// a router's Abort names a request at both nodes whichever leg it is in. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "src/base/readiness.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/rooms.h"
#include "src/request/generator.h"
#include "src/service/prefill/prompt_counts.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {

class HoldingGenerator : public Generator {
 public:
  struct Options {
    uint32_t vocab_size = 0;
    std::string model_fingerprint;
    std::function<std::string()> address;  // under which decode nodes reach this one
    int threads = 2;
    size_t max_queued = 64;  // prompts that may wait for a thread
    // Outlive the generator.
    HeldPrompts* held = nullptr;
    PromptCounts* counts = nullptr;
    // Where prompts that come with a room are promised; null: none may come with one.
    std::shared_ptr<Rooms> rooms;
    const Readiness* readiness = nullptr;
  };
  explicit HoldingGenerator(Options options);

  // INVALID_ARGUMENT (sampling), ALREADY_EXISTS (request_id; ROOM_TAKEN), UNAVAILABLE (draining),
  // RESOURCE_EXHAUSTED (QUEUE_FULL). Later the errors of HeldPrompts::Hold.
  absl::StatusOr<SequenceId> Submit(Request request) override;
  void Cancel(SequenceId id, absl::Status why) override;
  void CancelRequest(const std::string& request_id, absl::Status why,
                     std::function<void(bool)> done) override;
  void Wake() override {}  // one token always fits

 private:
  struct Prompt;
  // On a thread of the queue: to its end.
  void Run(const std::shared_ptr<Prompt>& prompt);
  absl::Status Hold(Prompt& prompt, FinishInfo* end);

  const Options options_;
  absl::Mutex mutex_;
  // Those alive, by the names that their callers gave them.
  std::map<std::string, std::shared_ptr<Prompt>> prompts_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  WorkerQueue workers_;  // last: its threads use the rest
};

}  // namespace sluice
