// The profile of policy ess for a model with latent caches and an indexer: how many entries a
// sequence misses in a step, by layer, context, batch and share of places, and how long a layer's
// stages take. Sequences decode through the real engine; each point is a run of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/policy_profile.h"

namespace sluice {

struct LatentProfileOptions {
  std::string model, device = "cpu", kernels = "auto", traffic;
  bool dummy = false;
  // Takes weights and contexts of the topic-drift workload (latent_drift.h).
  bool topic_drift = false;
  int64_t paths = 8;  // Paths of that workload.
  int threads = 1;
  int64_t prompts = 4, seed = 1, steps = 64, block_tokens = 32, least_places = 6400;
  int64_t transfer_workers = 4;
  std::string hbm_bytes, dram_bytes;
  std::vector<int64_t> contexts, batches;
  std::vector<double> ratios;
};

// Returns the profile, and prints a table of it to standard output. Errors name the flag and the
// remedy, or are those of the model, the device and the policy.
absl::StatusOr<PolicyProfile> ProfileLatents(const LatentProfileOptions& options);

}  // namespace sluice
