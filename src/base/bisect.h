// Binary search over integers.
#pragma once

#include <cstdint>

namespace sluice {

// Returns the largest value in [low, high] for which `holds` is true, or `low` if there is none
// above it: holds(low) is never asked. REQUIRES: low <= high, high - low fits int64_t, and a value
// for which `holds` is false is followed by such values alone.
template <typename Holds>
int64_t LargestThat(int64_t low, int64_t high, const Holds& holds) {
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace sluice
