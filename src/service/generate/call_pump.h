// The thread on which the tokens of all calls become messages and are handed to gRPC, so that the
// engine's thread only says that there are some: a write costs it tens of microseconds, this one or
// two. Where the pump falls behind, tokens gather in their streams and go out several to a message.
#pragma once

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

class CallPump {
 public:
  class Source {
   public:
    virtual ~Source() = default;

   private:
    friend class CallPump;
    // Sends what there is; does not block. On the pump's thread.
    virtual void Pump() = 0;
    // Under the pump's mutex.
    Source* next_ = nullptr;
    bool queued_ = false;
  };

  CallPump();
  // REQUIRES: every source was forgotten.
  ~CallPump();

  // The source's Pump() runs once after this, however often it was asked for until then. Any
  // thread; waits for nobody and allocates nothing.
  void Wake(Source* source);
  // When this returns Pump() is not under way, nor will it be. Not from Pump().
  void Forget(Source* source);

 private:
  void Loop();

  absl::Mutex mutex_;
  // Not Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil.
  absl::CondVar queued_, ran_;
  // A list through Source::next_.
  Source* first_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Source* last_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Source* running_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace sluice
