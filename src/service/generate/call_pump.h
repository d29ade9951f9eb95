// The thread that turns the tokens of all calls into messages and hands them to gRPC. The engine's
// thread only says that a call has tokens: a write would cost it tens of microseconds, and this
// call costs one or two. If the pump falls behind, tokens gather in their streams and go out
// several to a message.
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
    // Sends what there is, without blocking. Runs on the pump's thread.
    virtual void Pump() = 0;
    // Guarded by the pump's mutex.
    Source* next_ = nullptr;
    bool queued_ = false;
  };

  CallPump();
  // REQUIRES: every source was forgotten.
  ~CallPump();

  // Makes the source's Pump() run once after this call, however often it was asked for until then.
  // Any thread; waits for nobody and allocates nothing.
  void Wake(Source* source);
  // Returns when Pump() is not under way and will not run again. Must not be called in Pump().
  void Forget(Source* source);

 private:
  void Loop();

  absl::Mutex mutex_;
  // These are no Mutex::Await because ThreadSanitizer cannot see into Debian's Abseil.
  absl::CondVar queued_, ran_;
  // The list goes through Source::next_.
  Source* first_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Source* last_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Source* running_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace sluice
