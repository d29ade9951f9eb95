// Makes the device, the model, the tokenizer's bytes, the KV pools and the policy of a node from
// its configuration.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/memory_rates.h"
#include "src/device/rank_group.h"
#include "src/device/shared_arenas.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/model/token_bytes.h"
#include "src/server/cache_sizes.h"

namespace sluice {

// Makes the device of the setting `device`; auto takes a GPU that CheckCudaDevice accepts, else the
// CPU. Where `why` is given it is set to the reason of the choice: "as configured", or "auto: ...".
absl::StatusOr<std::unique_ptr<Device>> NewDevice(const Config& config, std::string* why = nullptr);

// Returns the memory that is free now; a rank's share of the host's.
absl::StatusOr<MemoryFound> FindMemory(const Config& config, const Device& device);

// Measures the memories of the node in about a second, for the forecasts of policy auto.
absl::StatusOr<DeviceRates> MeasureNodeRates(const Config& config, Device* device);

// Returns the options of a model whose steps have at most `max_rows` rows, of which `max_logits`
// want logits. The errors are those of LoadModelConfig.
absl::StatusOr<Model::Options> ModelOptionsOf(const Config& config, int max_rows, int max_logits);
// Returns the file of this rank for the setting expert_load_out.
std::string ExpertLoadPath(const Config& config);
// Loads the model with these options. `ranks`: those of the node, where it has several.
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Config& config, int max_rows, int max_logits,
                                                 Device* device, RankGroup* ranks = nullptr);

// Returns what `config` says about the policy, including its profile, and what `model` tells of
// itself, unless it is null. The caller fills in device, pools and shapes. The profile must be of
// the model with that fingerprint; an empty one accepts any model. The errors are those of
// ReadPolicyProfile and ApplyPolicyProfile.
absl::StatusOr<PolicyOptions> PolicyOptionsOf(const Config& config, const std::string& fingerprint,
                                              const CacheLayout& layout,
                                              const Model* model = nullptr);

// The KV pools of a decode node and the policy that uses them.
struct NodeMemory {
  std::unique_ptr<PagePool> hbm;
  std::unique_ptr<PagePool> dram;
  std::unique_ptr<AttentionPolicy> policy;
};
// `arenas`: those of the node's ranks, whose own one is then the DRAM; null: the node has one rank.
// REQUIRES: the sizes in `config` are numbers, not auto.
absl::StatusOr<NodeMemory> NewNodeMemory(const Config& config, const Model& model, Device* device,
                                         const SharedArenas* arenas = nullptr);
// Returns what stands on rank 0 for the pools and the policy of another rank that has sequences of
// its own (rank_leader.h): the pool of DRAM is that rank's arena, and nothing else is memory.
// `arenas`: null where rank 0 does not see them; then no page of the pool may be touched.
// REQUIRES: `planning` is a PlanningDevice, which outlives the result.
absl::StatusOr<NodeMemory> NewMemoryOfRank(const Config& config, const Model& model,
                                           Device* planning, const SharedArenas* arenas, int rank);

// Returns nullopt if the model directory has no tokenizer.json, or one of an unknown kind (which is
// logged); stop strings are then refused. A broken file is an error.
absl::StatusOr<std::optional<TokenBytes>> LoadTokenBytes(const Config& config);

// Returns the type of the setting kv_dtype; auto is fp8 for latent caches that have a packed form,
// else bf16.
DType KvDType(const Config& config, const ModelConfig& model);
// Returns the configured seed, or one from the system.
uint64_t SeedOf(const Config& config);
// Returns the number of CPU threads that attend to what is not in HBM.
int WorkersOf(const Config& config);
// Returns the number of CPU threads that compute.
int ThreadsOf(const Config& config);

// Returns the version that GetModel reports.
std::string Version();

}  // namespace sluice
