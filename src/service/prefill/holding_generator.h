// A prefill node as a Generator. Its sequences are prompts that are computed and held for a decode
// node. They end after one token, and FinishInfo::source says where the caches are. A held prompt
// still belongs to its request: cancelling the request by its name releases the caches, although
// the sequence has ended, because a router's Abort names a request at both nodes whichever leg it
// is in. Thread-safe.
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
    // These outlive the generator.
    HeldPrompts* held = nullptr;
    PromptCounts* counts = nullptr;
    // The rooms in which prompts are promised. Null if no prompt may come with a room.
    std::shared_ptr<Rooms> rooms;
    const Readiness* readiness = nullptr;
  };
  explicit HoldingGenerator(Options options);

  // Fails with INVALID_ARGUMENT (sampling), ALREADY_EXISTS (request_id; ROOM_TAKEN), UNAVAILABLE
  // (draining) or RESOURCE_EXHAUSTED (QUEUE_FULL). The sequence may later end with an error of
  // HeldPrompts::Hold.
  absl::StatusOr<SequenceId> Submit(Request request) override;
  void Cancel(SequenceId id, absl::Status why) override;
  void CancelRequest(const std::string& request_id, absl::Status why,
                     std::function<void(bool)> done) override;
  void Wake() override {}  // one token always fits

 private:
  struct Prompt;
  // Runs a prompt to its end, on a thread of the queue.
  void Run(const std::shared_ptr<Prompt>& prompt);
  absl::Status Hold(Prompt& prompt, FinishInfo* end);

  const Options options_;
  absl::Mutex mutex_;
  // The live prompts by the names that their callers gave them.
  std::map<std::string, std::shared_ptr<Prompt>> prompts_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  WorkerQueue workers_;  // last: its threads use the rest
};

}  // namespace sluice
