// Copies of data that nobody here reads soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// memcpy that leaves the caches to others: the target's lines are neither read before they are
// written nor kept. Before another thread may read the target: FenceStreamedStores(). For targets
// that are much larger than a cache line; others are copied as by memcpy.
void StreamCopy(uint8_t* to, const uint8_t* from, size_t bytes);

// Orders everything that this thread has streamed before what it stores next.
void FenceStreamedStores();

}  // namespace sluice
