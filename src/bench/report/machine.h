// The machine on which a report was made: its processor, its memory and the build.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::bench {

struct Machine {
  std::string cpu;  // "Intel(R) Xeon(R) ..."
  int cores = 0;    // Cores that this process may use.
  int64_t memory_bytes = 0;
  std::string revision;  // Revision of the sources; it ends in "-dirty" if they had local changes.
};

// Reads /proc and the build's revision. A text is "unknown" where the system does not say.
Machine ThisMachine();

}  // namespace sluice::bench
