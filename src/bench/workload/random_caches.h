// Fills caches with random values: a bench of long contexts on a large model cannot wait for a
// prefill. A step's work does not depend on the values in the caches, but a GPU draws less power
// over zeros, and so clocks higher, than over values like those of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice::bench {

// Returns `count` bf16 values, uniform in [-1, 1).
std::vector<uint16_t> RandomValues(size_t count, uint64_t seed);

// Writes such values to every page of a pool of one kind in the device's memory, and waits for
// completion.
absl::Status FillWithRandomValues(Device& device, const PagePool& pool);

}  // namespace sluice::bench
