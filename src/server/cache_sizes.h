// Chooses the sizes of KV caches that the configuration leaves to the program: hbm_bytes,
// dram_bytes and hold_bytes with the value auto. All functions are pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "src/device/machine_memory.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// The memory that a node finds once its weights and its workspace are in place.
struct MemoryFound {
  bool gpu = false;            // the device has memory of its own
  int64_t gpu_free_bytes = 0;  // REQUIRES: 0 where there is no GPU
  MachineMemory host;
  // This rank's share of what is free in /dev/shm, where the DRAM of ranks lies. Nothing: the node
  // has one rank.
  std::optional<int64_t> shared_bytes;
};

struct CacheSize {
  uint64_t bytes = 0;
  std::string why;  // "as configured", or "auto: " and the rule
};

// Each of these returns `configured` unless that is kAutoBytes. On a device without memory of its
// own all KV caches lie in ordinary memory, which is taken when it is first touched; automatic
// sizes are then small shares of it with a fixed upper limit.

// Returns the size of a decode node's KV cache in HBM: automatically 90 % of what is free, or less
// where `beside_bytes`, which the batch and the policy take of HBM, and CUDA's own needs leave
// less. On the CPU: an eighth of the memory, 1 GiB at most. The result may be 0.
CacheSize DecodeHbmSize(uint64_t configured, const MemoryFound& found, int64_t beside_bytes);

// Returns the size of the host KV cache: automatically half of the memory, and at most 90 % of what
// is available and 128 GiB, which take some 10 s to pin. On the CPU: a quarter of the memory, 4 GiB
// at most. Of ranks: 90 % of their share of /dev/shm at most.
CacheSize DecodeDramSize(uint64_t configured, const MemoryFound& found);

// Returns the size of a prefill node's KV cache in HBM, which holds one prompt at a time:
// automatically what a prompt of `max_context` tokens takes, and 90 % of what is free at most. On
// the CPU: that prompt, an eighth of the memory and 1 GiB at most.
CacheSize PrefillHbmSize(uint64_t configured, const MemoryFound& found, const CacheLayout& layout,
                         int64_t max_context);

// Returns the size of the memory in which a prefill node holds prompts: automatically a quarter of
// the memory, and at most 90 % of what is available and 64 GiB. On the CPU: an eighth, 2 GiB at
// most.
CacheSize HoldSize(uint64_t configured, const MemoryFound& found);

// Returns the largest hbm_bytes for which the batch and the policy (`beside_bytes`) and CUDA's own
// needs leave room on a GPU; 0 or less: there is none.
int64_t LargestHbmBytes(const MemoryFound& found, int64_t beside_bytes);

// Checks that the sizes of a decode node on a GPU fit, before anything is allocated: pinned memory
// is touched at once, and a machine that has too little of it would end the process. Of ranks, also
// of those on the CPU, checks that their DRAM fits into /dev/shm.
// RESOURCE_EXHAUSTED says which setting to lower, by how much, and what would fit.
absl::Status CheckCacheSizes(const MemoryFound& found, int64_t beside_bytes, uint64_t hbm_bytes,
                             uint64_t dram_bytes);

}  // namespace sluice
