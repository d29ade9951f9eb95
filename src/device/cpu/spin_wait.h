// Waiting for an atomic to change: a short spin, which catches the next operator of a running step,
// then the futex, so that an idle device costs nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {

inline void CpuRelax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// The longest spin before a thread parks: long against the gap between two operators of a step (a
// few microseconds), short against a scheduler's time slice.
inline constexpr std::chrono::microseconds kSpin{50};

// Returns once value.load() != old.
template <typename T>
void WaitWhileEqual(const std::atomic<T>& value, T old) {
  if (value.load(std::memory_order_acquire) != old) return;
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      CpuRelax();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// Publishes a value to the threads that wait for it. It is a read-modify-write, not a plain store:
// the check for waiters inside notify must not pass the store, or a thread that parks just then
// sleeps for ever.
template <typename T>
void StoreAndNotify(std::atomic<T>& value, T desired) {
  value.exchange(desired, std::memory_order_seq_cst);
  value.notify_all();
}

}  // namespace sluice
