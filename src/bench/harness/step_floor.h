// The minimum of bytes that a decode step under a policy must move, and the time that takes at the
// rates of this machine's memories, measured in this run.
//
// HBM: the weights once (except for an embedding's other rows), W_q again in each layer whose
// queries are predicted, the metadata that selection reads, the resident K and V that are attended
// to, and the K and V that are brought there. Link: K and V written through, recalled or fetched,
// and with CPU workers queries and their answers; both directions at once. DRAM: the K and V that
// the workers attend to, and those that the link reads. (Latent caches: weights, index keys,
// selected entries and missed entries; every expert counts as read.) The three overlap in a perfect
// step, so the floor is the longest of them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_statistics.h"
#include "src/bench/harness/bench_device.h"
#include "src/model/model.h"

namespace sluice::bench {

// Bytes per second, or bytes.
struct StepTraffic {
  double hbm = 0;
  double to_device = 0;
  double to_host = 0;
  double dram = 0;  // Bytes read.
};

// Measures the rates. `threads` threads read DRAM together, as the workers do.
absl::StatusOr<StepTraffic> MeasureRates(BenchDevice& bench, int threads);

// Returns the bytes of a step of `batch` sequences of `tokens` tokens each. `statistics` says what
// was selected and where it lay.
StepTraffic BytesOfStep(const Model& model, AttentionPolicy& policy,
                        const PolicyStatistics& statistics, int batch, double tokens);

struct StepFloor {
  double seconds = 0;
  std::string bound;  // The memory that sets it: "HBM", "link" or "DRAM".
};
StepFloor FloorOf(const StepTraffic& bytes, const StepTraffic& rates);

nlohmann::json ToJson(const StepTraffic& traffic);

}  // namespace sluice::bench
