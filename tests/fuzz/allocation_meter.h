// Measures how much memory a piece of code holds at once. It counts this program's operator new and
// delete, or what a sanitizer's allocator gives.
#pragma once

#include <cstddef>

namespace sluice::fuzz {

// Measures from its construction on. One meter at a time, on one thread.
class AllocationMeter {
 public:
  AllocationMeter();
  // Returns the most bytes that were allocated at one time, beyond those allocated when the meter
  // was made.
  size_t peak_bytes() const;
};

}  // namespace sluice::fuzz
