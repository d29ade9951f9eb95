// The command line of `sluice-bench policies`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/attention/policy_options.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/workload/latent_drift.h"
#include "src/bench/workload/topic_drift.h"
#include "src/device/device.h"

namespace sluice::bench {

struct PoliciesBenchOptions {
  std::string device = "cpu", model, kernels = "auto", policies = "full,scout,recall,hgca,oracle";
  std::string auto_quality = "fast";  // What policy auto may take.
  std::string policy_profile, fluxion_predictor, texts, json, out, hbm_bytes = "256MiB",
                                                                   dram_bytes = "2GiB";
  bool dummy = false, quality = false, topic_drift = false, no_recall = false, largest = true,
       trace = true;
  TopicDrift drift;
  LatentDrift latent_drift;
  int64_t paths = 8;
  bool latent = false;         // The model has latent caches.
  std::vector<double> drifts;  // Run one after the other.
  int64_t topics = 256, segment = 96, jump = 0, statistics = 0;
  std::string traffic;  // Traffics to run (traffic_report.h) instead of equal sequences.
  int64_t threads = 0, workers = 1, steps = 16, most = 16, seed = 1, distinct = 4;
  int64_t budget = 512, dense_layers = 2, block_tokens = 32, hgca_window = 512;
  int64_t quality_texts = 12, quality_steps = 256, passkeys = 72;
  std::vector<double> budget_shares;  // Of the context, for quality and pass keys.
  bool blame = true;
  std::vector<int64_t> contexts = {2048}, batches = {1};
  // Measure the cost of transfers in a step (overlap_run.h) under policies that fetch latent
  // entries: with the indexer's own selections, and with these numbers of forced misses.
  bool overlap = false;
  std::vector<int64_t> forced_misses;
  bool runs = true;  // False: only the figures of --overlap and --misses.
  // Memory of the forecast, which this machine need not have. Empty: no forecast for forecast_dram,
  // the HBM of the runs for forecast_hbm.
  std::string forecast_dram, forecast_hbm;
  PolicyOptions policy;
};

// Reads the command line. Returns the exit status if there is nothing to measure.
std::optional<int> ReadPoliciesOptions(const Invocation& invocation, PoliciesBenchOptions* options,
                                       std::vector<std::string>* policies);

// Returns the HBM for caches: what is given, or for auto what is free on the device beside
// `contexts` bytes, of which a twentieth, and 4 GiB at least, are left to the policies' tables.
int64_t HbmBytesOf(const PoliciesBenchOptions& options, const Device& device, int64_t contexts);

// Returns the description of the decoded workload, for reports.
std::string WorkloadName(const PoliciesBenchOptions& options, double drift);

}  // namespace sluice::bench
