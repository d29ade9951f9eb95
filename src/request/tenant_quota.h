// What one tenant may have of a node at a time.
#pragma once

#include <cstdint>

namespace sluice {

struct TenantQuota {
  // 0: no bound.
  uint64_t sequences = 0;          // alive: waiting for their caches, for room, or in the batch
  uint64_t dram_bytes = 0;         // of open transfers and kept sequences
  uint64_t tokens_per_second = 0;  // of output, over kTokenWindow
};

}  // namespace sluice
