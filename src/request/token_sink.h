// The target of a sequence's tokens. The engine never waits for a reader: it asks HasRoom() before
// it plans a row for the sequence, and parks the sequence while there is no room.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/request/source_ref.h"
#include "src/request/token.h"

namespace sluice {

// When a sequence reached its stages, as time since its arrival. Infinite: it never did.
struct StageTimes {
  absl::Duration ready = absl::InfiniteDuration();     // its handed-over KV was there, or given up
  absl::Duration admitted = absl::InfiniteDuration();  // it got its slot in the running batch
  absl::Duration stepped = absl::InfiniteDuration();   // its first step was launched
};

// How a sequence ended. A sequence has exactly one.
struct FinishInfo {
  enum class Reason { kStop, kLength, kError };
  Reason reason = Reason::kError;
  absl::Status status;  // the error, with kError
  std::optional<int32_t> stop_token_id;
  std::optional<std::string> stop_string;
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
  uint32_t cached_tokens = 0;  // prompt tokens whose caches were handed over, kept, or reused
  uint32_t reused_tokens = 0;  // those of them that earlier sequences had left here
  // Output tokens, from the first on, that were computed with attention to every token before them;
  // 0 if an earlier turn was approximate.
  uint32_t exact_tokens = 0;
  uint32_t drafted_tokens = 0;   // drafts that steps verified (src/engine/drafter.h)
  uint32_t accepted_tokens = 0;  // those of them that became output tokens
  std::string transfer_id;       // empty if nothing was handed over
  std::string sequence_id;       // the kept sequence; empty if it is not kept
  SourceRef source;              // where its prompt is held; empty if it is not
  absl::Duration queued;         // time between being ready and joining the batch
  absl::Duration first_token;    // time since its arrival; zero if there was none
  absl::Duration total;          // time since its arrival
  StageTimes stages;
};

// The engine's side, called on the engine's thread only.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  // Returns whether `count` more tokens fit beside those that were emitted and not read.
  virtual bool HasRoom(size_t count) const = 0;
  // REQUIRES: HasRoom(1) held since the row was planned.
  virtual void Emit(OutputToken token) = 0;
  // Must be the last call.
  virtual void Finish(FinishInfo info) = 0;
};

// A bounded queue between the engine and one reader on another thread.
class TokenStream : public TokenSink {
 public:
  // `on_room` runs on the reader's thread when the reader has taken enough that a parked sequence
  // can go on; it wakes the engine.
  explicit TokenStream(size_t capacity, std::function<void()> on_room = nullptr);

  bool HasRoom(size_t count) const override;
  void Emit(OutputToken token) override;
  void Finish(FinishInfo info) override;

  // The reader's side. `on_ready` runs on the engine's thread, outside the lock, whenever there is
  // something to Read() that was not there at the last Read(), and at once if there is now. It may
  // be set once and cleared with nullptr; after the clearing call returns, no call is under way or
  // will come.
  void SetReadyCallback(std::function<void()> on_ready);
  struct Batch {
    std::vector<OutputToken> tokens;
    std::optional<FinishInfo> finish;  // comes after the last token
  };
  // Returns everything there is, which may be nothing.
  Batch Read();
  // Blocks until Read() would return something.
  Batch ReadBlocking();
  // Returns whether Finish was called, read or not.
  bool Finished() const;

 private:
  const size_t capacity_;
  const std::function<void()> on_room_;
  // Held while on_ready_ runs, so that clearing it waits. Emit never holds it together with mutex_.
  absl::Mutex callback_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::function<void()> on_ready_ ABSL_GUARDED_BY(callback_mutex_);
  mutable absl::Mutex mutex_;
  absl::CondVar readable_;  // no Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil
  // A ring that grows up to capacity_. If the reader keeps up, a token allocates nothing.
  std::vector<OutputToken> ring_ ABSL_GUARDED_BY(mutex_);
  size_t first_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t size_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<FinishInfo> finish_ ABSL_GUARDED_BY(mutex_);
  bool finish_read_ ABSL_GUARDED_BY(mutex_) = false;

  void Notify();
  bool Readable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch TakeLocked(bool* freed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
};

}  // namespace sluice
