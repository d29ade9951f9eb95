// The least that a decode step under a policy must move, and the time that takes at the rates which
// this machine's memories have in this run.
//
// HBM: the weights once (but for an embedding's other rows), those of W_q again in each layer whose
// queries are predicted, the metadata that selection reads, the resident K and V that are attended
// to, and what is brought there. Link: K and V written through, recalled or fetched, and with CPU
// workers queries and their answers; both directions at once. DRAM: what the workers attend to, and
// what the link reads. (Of latent caches: weights, index keys, selected entries, what is missed;
// every expert is taken to be read.) The three overlap in a perfect step, so the floor is the
// longest of them.
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
  double dram = 0;  // read
};

// `threads`: that read DRAM together, as the workers do.
absl::StatusOr<StepTraffic> MeasureRates(BenchDevice& bench, int threads);

// Bytes of a step of `batch` sequences of `tokens` tokens each, of which `statistics` says what was
// selected and where it lay.
StepTraffic BytesOfStep(const Model& model, AttentionPolicy& policy,
                        const PolicyStatistics& statistics, int batch, double tokens);

struct StepFloor {
  double seconds = 0;
  std::string bound;  // what sets it: "HBM", "link", "DRAM"
};
StepFloor FloorOf(const StepTraffic& bytes, const StepTraffic& rates);

nlohmann::json ToJson(const StepTraffic& traffic);

}  // namespace sluice::bench
