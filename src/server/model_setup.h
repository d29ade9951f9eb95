// Configuration -> device, model and tokenizer: what both programs need.
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
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/model/token_bytes.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<Device>> NewDevice(const Config& config);

// `max_rows`, `max_logits`: of a step. The errors of LoadModelConfig.
absl::StatusOr<Model::Options> ModelOptionsOf(const Config& config, int max_rows, int max_logits);
// A model by these options.
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Config& config, int max_rows, int max_logits,
                                                 Device* device);

// The pools of a decode node and the policy over them.
struct NodeMemory {
  std::unique_ptr<PagePool> hbm;
  std::unique_ptr<PagePool> dram;
  std::unique_ptr<AttentionPolicy> policy;
};
// What `config` says of the policy, with its profile; device, pools and shapes are left to the
// caller. `fingerprint`: of the model that the profile must be of; empty: of any.
// Errors are those of ReadPolicyProfile and ApplyPolicyProfile.
absl::StatusOr<PolicyOptions> PolicyOptionsOf(const Config& config, const std::string& fingerprint,
                                              const CacheLayout& layout);
absl::StatusOr<NodeMemory> NewNodeMemory(const Config& config, const Model& model, Device* device);

// nullopt if the model directory has no tokenizer.json, or one of a kind that is not known (which
// is logged): stop strings are then refused. An error if the file is broken.
absl::StatusOr<std::optional<TokenBytes>> LoadTokenBytes(const Config& config);

// The setting kv_dtype; auto: fp8 for latent caches that have a packed form, else bf16.
DType KvDType(const Config& config, const ModelConfig& model);
// The configured seed, or one from the system.
uint64_t SeedOf(const Config& config);
int ThreadsOf(const Config& config);

// The version that GetModel tells.
std::string Version();

}  // namespace sluice
