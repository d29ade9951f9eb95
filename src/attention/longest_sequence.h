// The longest sequence that fits into empty pools, for SequencePlacement::max_tokens.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace sluice {

// Returns the largest number of tokens in [0, most] for which `fits` is true. REQUIRES: a length
// that fits also fits when it is shorter, and 0 fits.
inline int64_t LongestSequence(int64_t most, absl::FunctionRef<bool(int64_t tokens)> fits) {
  int64_t low = 0, high = most;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace sluice
