// The minimum of bytes that a decode step under a policy must move, and the time that takes at the
// rates of a machine's memories.
//
// HBM: the weights once (except for an embedding's other rows), W_q again in each layer whose
// queries are predicted, the metadata that selection reads, the resident K and V that are attended
// to, and the K and V that are brought there. Link: K and V written through, recalled or fetched,
// and with CPU workers queries and their answers; both directions at once. DRAM: the K and V that
// the workers attend to, those that the link reads, and the metadata that workers read. (Latent
// caches: weights, index keys, selected entries and missed entries; every expert counts as read.)
// The three overlap in a perfect step, so the floor is the longest of them.
#pragma once

#include <cstdint>
#include <string>

#include "src/attention/attention_policy.h"
#include "src/attention/policy_statistics.h"
#include "src/device/memory_rates.h"
#include "src/kv/cache_layout.h"
#include "src/model/model.h"
#include "src/model/model_config.h"

namespace sluice {

// The parts of a model that a step's bytes follow from.
struct StepModel {
  const ModelConfig& config;
  const CacheLayout& layout;
  int64_t weight_bytes = 0;

  static StepModel Of(const Model& model) {
    return {model.config(), model.cache_layout(), model.weight_bytes()};
  }
};

// Returns the bytes of a step of `batch` sequences of `tokens` tokens each. `statistics` says what
// was selected, or is expected to be, and where it lay.
MemoryTraffic BytesOfStep(const StepModel& model, AttentionPolicy& policy,
                          const PolicyStatistics& statistics, int batch, double tokens);

struct StepFloor {
  double seconds = 0;
  std::string bound;  // the memory that sets it: "HBM", "link" or "DRAM"
};
StepFloor FloorOf(const MemoryTraffic& bytes, const MemoryTraffic& rates);

}  // namespace sluice
