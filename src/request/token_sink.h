// Where a sequence's tokens go. The engine never waits for a reader: it asks HasRoom() before it
// plans a row for the sequence, and parks the sequence while there is none.
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

// How a sequence ended; exactly one per sequence.
struct FinishInfo {
  enum class Reason { kStop, kLength, kError };
  Reason reason = Reason::kError;
  absl::Status status;  // of kError
  std::optional<int32_t> stop_token_id;
  std::optional<std::string> stop_string;
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
  uint32_t cached_tokens = 0;
  std::string transfer_id;     // empty: nothing was handed over
  std::string sequence_id;     // of the kept sequence; empty: it is not kept
  SourceRef source;            // where its prompt is held; empty: it is not
  absl::Duration queued;       // from ready to its place in the batch
  absl::Duration first_token;  // from its arrival; zero: there was none
  absl::Duration total;        // from its arrival
};

// Engine's side; called from the engine's thread only.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  // Whether `count` more tokens fit, over those already emitted and not read.
  virtual bool HasRoom(size_t count) const = 0;
  // REQUIRES: HasRoom(1) held since the row was planned.
  virtual void Emit(OutputToken token) = 0;
  // The last call.
  virtual void Finish(FinishInfo info) = 0;
};

// A bounded queue between the engine and one reader on another thread.
class TokenStream : public TokenSink {
 public:
  // `on_room`: called from the reader's thread when it has taken enough that a parked sequence can
  // go on: wakes the engine.
  explicit TokenStream(size_t capacity, std::function<void()> on_room = nullptr);

  bool HasRoom(size_t count) const override;
  void Emit(OutputToken token) override;
  void Finish(FinishInfo info) override;

  // Reader's side. `on_ready` is called from the engine's thread, outside the lock, whenever there
  // is something to Read() that was not there at the last Read(); at once if there is now. Once
  // set, it may be cleared with nullptr; after that returns no call is under way or will come.
  void SetReadyCallback(std::function<void()> on_ready);
  struct Batch {
    std::vector<OutputToken> tokens;
    std::optional<FinishInfo> finish;  // after the last token
  };
  // Takes all there is; empty if nothing is.
  Batch Read();
  // Blocks until Read() would give something.
  Batch ReadBlocking();
  // Whether Finish was called, read or not.
  bool Finished() const;

 private:
  const size_t capacity_;
  const std::function<void()> on_room_;
  // Held while on_ready_ runs, so that clearing it waits; never held together with mutex_ by Emit.
  absl::Mutex callback_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::function<void()> on_ready_ ABSL_GUARDED_BY(callback_mutex_);
  mutable absl::Mutex mutex_;
  absl::CondVar readable_;  // not Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil
  // A ring that grows up to capacity_: where the reader keeps up, a token allocates nothing.
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
