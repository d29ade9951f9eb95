// The capacity planner behind --print-plan: what fits into the configured memory. Reads config.json
// and no weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/model/model_config.h"

namespace sluice {

struct PlanInput {
  ModelConfig model;
  CacheLayout layout;
  int64_t hbm_bytes = 0;
  int64_t dram_bytes = 0;
  int64_t max_context = 0;
  int64_t max_sequences = 0;
  int64_t max_rows = 0;  // of a step
  // What the device is asked for beside the caches.
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t batch_bytes = 0;      // histories, tables, logits of the running batch; the policy's own
  int64_t pinned_bytes = 0;     // of DRAM, for the same
  Device::DeviceMemory device;  // what it has before any of it
  std::string policy;           // that is configured
  // The policies that keep a sequence's home in DRAM.
  struct Policy {
    std::string name;
    absl::Status status;  // why there is none under these settings
    // What it asks for beside its sequences: tables, scratch, requests to workers.
    int64_t beside_hbm_bytes = 0;
    int64_t beside_pinned_bytes = 0;
    // Of a sequence of so many tokens of prompt and output, by the policy's own footprint.
    struct Headroom {
      int64_t context = 0;
      int64_t hbm_bytes = 0;
      int64_t dram_bytes = 0;
      std::string kinds;    // what is where, of a model with several kinds of caches
      int64_t running = 0;  // that HBM and DRAM hold, at most max_sequences
    };
    std::vector<Headroom> rooms;
    // How it lays its transfers beside compute at first, where it chooses: with one sequence, and
    // with max_sequences.
    std::string one, all;
  };
  std::vector<Policy> policies;
};

// Sequences of `context` tokens that an arena of `bytes` holds at once.
int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, const TokensByKind& context);
// Tokens of one sequence that it holds.
int64_t TokensThatFit(const CacheLayout& layout, int64_t bytes);

// A readable table, a few dozen lines.
std::string FormatPlan(const PlanInput& input);

// What sluice-server will ask its device for under this configuration, found by making its objects
// on a PlanningDevice. Errors are those of LoadModelConfig, of the settings and of NewDevice.
absl::StatusOr<PlanInput> PlanOf(const Config& config);
// FormatPlan of PlanOf.
absl::StatusOr<std::string> PrintPlan(const Config& config);

}  // namespace sluice
