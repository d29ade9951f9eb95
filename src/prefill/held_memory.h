// The memory of held prompts, of at most max_bytes: ordinary memory that is allocated for each
// prompt, or parts of an arena that exists from the start, such as memory that a device reaches.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "src/device/device.h"

namespace sluice {

class HeldMemory {
 public:
  // An arena that is empty means ordinary memory. REQUIRES: another has max_bytes bytes or more.
  HeldMemory(uint64_t max_bytes, Buffer arena);

  // Returns `bytes` contiguous bytes with any contents, or null if they do not fit beside what is
  // taken. In an arena that is also so if no gap is long enough. They go back with their last
  // owner, who may outlive this object. REQUIRES: bytes > 0.
  std::shared_ptr<uint8_t[]> Take(uint64_t bytes);
  uint64_t taken() const;
  uint64_t max_bytes() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace sluice
