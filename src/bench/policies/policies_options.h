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

namespace sluice::bench {

struct PoliciesBenchOptions {
  std::string device = "cpu", model, kernels = "auto", policies = "full,scout,recall,hgca,oracle";
  std::string policy_profile, texts, json, out, hbm_bytes = "256MiB", dram_bytes = "2GiB";
  bool dummy = false, quality = false, topic_drift = false, no_recall = false, largest = true,
       trace = true;
  TopicDrift drift;
  LatentDrift latent_drift;
  int64_t paths = 8;
  bool latent = false;         // the model has latent caches
  std::vector<double> drifts;  // one after the other
  int64_t topics = 256, segment = 96, statistics = 0;
  int64_t threads = 0, workers = 1, steps = 16, most = 16, seed = 1, distinct = 4;
  int64_t budget = 512, dense_layers = 2, block_tokens = 32, hgca_window = 512;
  int64_t quality_texts = 2, quality_steps = 64, passkeys = 4;
  std::vector<int64_t> contexts = {2048}, batches = {1};
  // What transfers cost a step (overlap_run.h) under policies that fetch latent entries: with the
  // indexer's own selections, and with so many misses.
  bool overlap = false;
  std::vector<int64_t> set_misses;
  bool runs = true;  // what every other figure is from
  // Of memory that this machine need not have; empty: no forecast, the HBM of the runs.
  std::string forecast_dram, forecast_hbm;
  PolicyOptions policy;
};

// The exit status if there is nothing to measure.
std::optional<int> ReadPoliciesOptions(const Invocation& invocation, PoliciesBenchOptions* options,
                                       std::vector<std::string>* policies);

// What is decoded, for reports.
std::string WorkloadName(const PoliciesBenchOptions& options, double drift);

}  // namespace sluice::bench
