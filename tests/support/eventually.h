// Waits for another thread, in real time.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace sluice::testing {

// Returns whether `holds()` becomes true within that time. It is asked every millisecond. A machine
// that is busy with other tests may hold a thread up for seconds.
template <typename Predicate>
bool Eventually(absl::Duration within, const Predicate& holds) {
  const absl::Time give_up = absl::Now() + within;
  while (!holds()) {
    if (absl::Now() > give_up) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace sluice::testing
