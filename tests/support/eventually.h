// Waiting for another thread, in real time.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace sluice::testing {

// Whether `holds()` comes true: asked every millisecond, for a minute, since a machine that is busy
// with other tests may hold a thread up for seconds.
template <typename Predicate>
bool Eventually(const Predicate& holds) {
  const absl::Time give_up = absl::Now() + absl::Minutes(1);
  while (!holds()) {
    if (absl::Now() > give_up) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace sluice::testing
