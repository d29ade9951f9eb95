// The capacity planner: how a sluice-server would use the memory of this machine, and how many
// sequences fit into it. Reads config.json and no weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/machine_memory.h"
#include "src/kv/cache_layout.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/model/step_traffic.h"
#include "src/server/cache_sizes.h"

namespace sluice {

struct PlanInput {
  ModelConfig model;
  CacheLayout layout;
  int64_t hbm_bytes = 0;
  int64_t dram_bytes = 0;
  int64_t max_context = 0;
  int64_t max_sequences = 0;
  int64_t draft_tokens = 0;  // maximum drafts of a sequence in a step
  // Whether the model's draft layer makes them, and the bytes of its caches, which are a part of
  // batch_bytes.
  bool drafts_on_device = false;
  int64_t draft_cache_bytes = 0;
  int64_t max_rows = 0;                     // maximum rows in a step
  DType activation_type = DType::kFloat32;  // of what feeds products
  // Bytes that the device is asked for beside the KV caches.
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t batch_bytes = 0;   // tables and logits of the running batch, and the policy's own memory
  int64_t pinned_bytes = 0;  // the same in DRAM
  Device::DeviceMemory device;  // memory of the device before any of it is taken
  MachineMemory host;
  std::string device_name;
  // Reasons of what was chosen: "as configured", or "auto: " and the rule.
  std::string device_why, hbm_why, dram_why;
  std::string placement;  // NUMA node of pinned memory, and cpus of the configured policy's workers
  std::string policy;     // the configured one, or the one that auto takes
  std::string auto_text;  // why auto takes it (src/model/policy_auto.h); empty without auto
  // The policies that keep sequences in the host KV cache.
  struct Policy {
    std::string name;
    absl::Status status;  // not OK: the reason why these settings do not allow it
    // Bytes that it asks for beside its sequences: tables, scratch, requests to workers.
    int64_t beside_hbm_bytes = 0;
    int64_t beside_pinned_bytes = 0;
    int64_t exact_tokens = 0;  // AttentionPolicy::exact_tokens
    int workers = 0;           // CPU threads that attend to tokens that are not in HBM
    // The memory of a sequence with `context` tokens, prompt and output together.
    struct Headroom {
      int64_t context = 0;
      int64_t hbm_bytes = 0;
      int64_t dram_bytes = 0;
      std::string kinds;    // bytes by kind, for a model with several kinds of caches
      int64_t running = 0;  // sequences that HBM and DRAM hold at once, at most max_sequences
    };
    std::vector<Headroom> rooms;  // the last one is of max_context
    // Bytes that a step with the last room's running sequences is expected to move.
    MemoryTraffic step_bytes;
    // How it overlaps transfers and compute at first, if it chooses: with one sequence, and with
    // max_sequences.
    std::string one, all;
    std::string mover;  // who brings its misses over the link; empty: there is no choice
  };
  std::vector<Policy> policies;
};

// Returns the number of sequences of `context` tokens that an arena of `bytes` holds at once.
int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, const TokensByKind& context);
// Returns the number of tokens of one sequence that an arena of `bytes` holds.
int64_t TokensThatFit(const CacheLayout& layout, int64_t bytes);

// Returns a readable table of a few dozen lines.
std::string FormatPlan(const PlanInput& input);

// Returns what sluice-server will ask its device for under this configuration, found by making its
// objects on a PlanningDevice. The errors are those of LoadModelConfig, of the settings and of
// NewDevice.
absl::StatusOr<PlanInput> PlanOf(const Config& config);
// Returns FormatPlan of PlanOf.
absl::StatusOr<std::string> PrintPlan(const Config& config);

// Returns the answer to --check-config beside the settings: the plan's auto_text under policy auto,
// else nothing.
absl::StatusOr<std::string> CheckedPolicy(const Config& config);

// The sizes of a decode node's KV caches.
struct DecodeCacheSizes {
  CacheSize hbm, dram;
  int64_t beside_bytes = 0;  // HBM of the batch and the policy; 0 where the device has none
};
// Chooses the sizes for a model whose weights and workspace are on `device`, or are planned on it.
absl::StatusOr<DecodeCacheSizes> ChooseDecodeSizes(const Config& config, const Model& model,
                                                   const MemoryFound& found, Device* device);

// Plans the configured policy alone, over pools of the sizes that a node would choose for it.
absl::StatusOr<PlanInput::Policy> PlanConfiguredPolicy(const Config& config, const Model& model,
                                                       const MemoryFound& found, Device* device);

}  // namespace sluice
