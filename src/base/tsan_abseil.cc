// This file shows Abseil's locks, and the reference counts of its Status, to ThreadSanitizer.
//
// Debian's Abseil is a shared library built without the sanitizer. The sanitizer therefore sees
// none of its synchronisation, and reports a race for everything that an absl::Mutex guards. In
// builds with -fsanitize=thread the functions below stand before the library's: each calls the real
// one and tells the sanitizer what it orders. In other builds this file is empty.
#if defined(__SANITIZE_THREAD__)

#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include "absl/status/status.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"

namespace {

// Returns the library's own definition of a function, by its mangled name.
template <typename Function>
Function* Real(const char* symbol) {
  void* found = dlsym(RTLD_NEXT, symbol);
  SLUICE_CHECK(found != nullptr, "this Abseil has no ", symbol);
  return reinterpret_cast<Function*>(found);
}

// Abseil's graph of lock orders is guarded by a lock of its own that no function here stands
// before, and it moves memory by calls that the sanitizer does see. The sanitizer looks at lock
// orders too.
[[maybe_unused]] const bool no_graph_of_locks = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

void Acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
void Release(const void* object) { __tsan_release(const_cast<void*>(object)); }

// A condition is evaluated by a thread that holds the mutex: either the thread that waits for it,
// after it has told the sanitizer that it lets the mutex go, or the thread that unlocks.
class Seen {
 public:
  Seen(const absl::Mutex* mutex, const absl::Condition* condition)
      : mutex_(mutex), condition_(condition), seen_(&Seen::Eval, this) {}
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
  const absl::Condition& get() const { return seen_; }

 private:
  static bool Eval(Seen* seen) {
    Acquire(seen->mutex_);
    const bool holds = seen->condition_->Eval();
    Release(seen->mutex_);
    return holds;
  }
  const absl::Mutex* const mutex_;
  const absl::Condition* const condition_;
  const absl::Condition seen_;
};

}  // namespace

#define SLUICE_REAL(symbol, ...) static auto* const real = Real<__VA_ARGS__>("_ZN" symbol)
#define SLUICE_REAL_CONST(symbol, ...) static auto* const real = Real<__VA_ARGS__>("_ZNK" symbol)

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  SLUICE_REAL("4absl7debian35Mutex4LockEv", void(Mutex*));
  real(this);
  Acquire(this);
}

bool Mutex::TryLock() {
  SLUICE_REAL("4absl7debian35Mutex7TryLockEv", bool(Mutex*));
  const bool locked = real(this);
  if (locked) Acquire(this);
  return locked;
}

void Mutex::Unlock() {
  SLUICE_REAL("4absl7debian35Mutex6UnlockEv", void(Mutex*));
  Release(this);
  real(this);
}

void Mutex::ReaderLock() {
  SLUICE_REAL("4absl7debian35Mutex10ReaderLockEv", void(Mutex*));
  real(this);
  Acquire(this);
}

void Mutex::ReaderUnlock() {
  SLUICE_REAL("4absl7debian35Mutex12ReaderUnlockEv", void(Mutex*));
  Release(this);
  real(this);
}

void Mutex::LockWhen(const Condition& condition) {
  SLUICE_REAL("4absl7debian35Mutex8LockWhenERKNS0_9ConditionE", void(Mutex*, const Condition&));
  real(this, Seen(this, &condition).get());
  Acquire(this);
}

void Mutex::Await(const Condition& condition) {
  SLUICE_REAL("4absl7debian35Mutex5AwaitERKNS0_9ConditionE", void(Mutex*, const Condition&));
  Release(this);
  real(this, Seen(this, &condition).get());
  Acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  SLUICE_REAL("4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE",
              bool(Mutex*, const Condition&, Duration));
  Release(this);
  const bool held = real(this, Seen(this, &condition).get(), timeout);
  Acquire(this);
  return held;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  SLUICE_REAL("4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE",
              bool(Mutex*, const Condition&, Time));
  Release(this);
  const bool held = real(this, Seen(this, &condition).get(), deadline);
  Acquire(this);
  return held;
}

void CondVar::Wait(Mutex* mutex) {
  SLUICE_REAL("4absl7debian37CondVar4WaitEPNS0_5MutexE", void(CondVar*, Mutex*));
  Release(mutex);
  real(this, mutex);
  Acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  SLUICE_REAL("4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE",
              bool(CondVar*, Mutex*, Duration));
  Release(mutex);
  const bool expired = real(this, mutex, timeout);
  Acquire(mutex);
  return expired;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  SLUICE_REAL("4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE",
              bool(CondVar*, Mutex*, Time));
  Release(mutex);
  const bool expired = real(this, mutex, deadline);
  Acquire(mutex);
  return expired;
}

void Notification::Notify() {
  SLUICE_REAL("4absl7debian312Notification6NotifyEv", void(Notification*));
  Release(this);
  real(this);
}

void Notification::WaitForNotification() const {
  SLUICE_REAL_CONST("4absl7debian312Notification19WaitForNotificationEv",
                    void(const Notification*));
  real(this);
  Acquire(this);
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  SLUICE_REAL_CONST("4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
                    bool(const Notification*, Duration));
  const bool notified = real(this, timeout);
  Acquire(this);
  return notified;
}

bool BlockingCounter::DecrementCount() {
  SLUICE_REAL("4absl7debian315BlockingCounter14DecrementCountEv", bool(BlockingCounter*));
  Release(this);
  return real(this);
}

void BlockingCounter::Wait() {
  SLUICE_REAL("4absl7debian315BlockingCounter4WaitEv", void(BlockingCounter*));
  real(this);
  Acquire(this);
}

// The thread that gives up the last reference deletes what the others have read.
void Status::UnrefNonInlined(uintptr_t rep) {
  SLUICE_REAL("4absl7debian36Status15UnrefNonInlinedEm", void(uintptr_t));
  void* const shared = reinterpret_cast<void*>(rep);
  Release(shared);
  Acquire(shared);
  real(rep);
}

ABSL_NAMESPACE_END
}  // namespace absl

#endif  // __SANITIZE_THREAD__
