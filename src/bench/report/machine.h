// What a report says about where it was made: the processor, its memory, the build.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::bench {

struct Machine {
  std::string cpu;  // "Intel(R) Xeon(R) ..."
  int cores = 0;    // that this process may use
  int64_t memory_bytes = 0;
  std::string revision;  // of the sources, "-dirty" where they were changed
};

// From /proc and the build; "unknown" where the system does not say.
Machine ThisMachine();

}  // namespace sluice::bench
