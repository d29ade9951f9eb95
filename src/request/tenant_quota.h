// The limits on what one tenant may have of a node at a time.
#pragma once

#include <cstdint>

namespace sluice {

struct TenantQuota {
  // 0 means no limit.
  uint64_t sequences = 0;          // live sequences: waiting for caches or room, or in the batch
  uint64_t dram_bytes = 0;         // bytes of open transfers and kept sequences
  uint64_t tokens_per_second = 0;  // output tokens, over kTokenWindow
};

}  // namespace sluice
