// How much memory a piece of code holds at once: this program's operator new and delete are
// counted, or what a sanitizer's allocator gives.
#pragma once

#include <cstddef>

namespace sluice::fuzz {

// From its making on. One at a time, one thread.
class AllocationMeter {
 public:
  AllocationMeter();
  // The most bytes that were allocated at one time, over what was there when the meter was made.
  size_t peak_bytes() const;
};

}  // namespace sluice::fuzz
