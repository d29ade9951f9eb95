// Copies of data that this process does not read soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// Copies as memcpy does, and leaves the CPU's caches to others: the target's lines are neither read
// before they are written nor kept in a cache. Call FenceStreamedStores() before another thread may
// read the target. It pays for targets much larger than a cache line; smaller ones are copied as by
// memcpy.
void StreamCopy(uint8_t* to, const uint8_t* from, size_t bytes);

// Orders everything that this thread has streamed before everything that it stores next.
void FenceStreamedStores();

}  // namespace sluice
