// The messages in which vLLM publishes what its prefix cache got and lost
// (vllm/distributed/kv_events.py), in msgpack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "src/service/events/kv_event.h"

namespace sluice {

// vLLM 0.32 writes an event as a map with its fields' names; older ones wrote an array, in the same
// order of fields, and had no topic in the answers to replay requests.
enum class EventSchema { kMaps, kArrays };

// Returns a batch: [time, [event ...], data parallel rank]. `seconds` is the time since 1970,
// `unit` the tokens of a hash.
std::string EncodeBatch(double seconds, const std::vector<KvEvent>& events, int64_t unit,
                        EventSchema schema);

// Cuts events into batches with at most `max_units` hashes each, in order. An event that is longer
// becomes several that say the same. REQUIRES: no event is without hashes but kCleared ones.
std::vector<std::vector<KvEvent>> CutIntoBatches(std::vector<KvEvent> events, int64_t unit,
                                                 size_t max_units);

// Returns 8 bytes, the most significant first.
std::string EncodeSequence(uint64_t sequence);

}  // namespace sluice
