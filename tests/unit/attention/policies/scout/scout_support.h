// What the tests of policy scout share.
#pragma once

#include <cstdint>
#include <set>

namespace sluice::testing {

inline constexpr int kScoutTestRing = 2;  // blocks
// Kernels may round queries to bf16 before a product.
inline constexpr double kScoutTolerance = 1e-2;

// Returns the blocks with which a sequence of `context` tokens begins in `places` places beside the
// ring: the first, and the newest before the ring.
inline std::set<int32_t> FirstResident(int context, int block_tokens, int places) {
  const int newest = context / block_tokens;
  std::set<int32_t> resident;
  if (newest >= kScoutTestRing) resident.insert(0);
  for (int block = newest - kScoutTestRing; block > 0 && static_cast<int>(resident.size()) < places;
       --block) {
    resident.insert(block);
  }
  return resident;
}

}  // namespace sluice::testing
