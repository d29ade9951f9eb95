// The facts about itself that a node tells gateways, whatever their dialect.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/readiness.h"
#include "src/model/model.h"

namespace sluice {

// The facts that stay the same while the node runs.
struct NodeInfo {
  enum class Role { kPrefill, kDecode };
  Role role = Role::kDecode;
  std::string model_path;  // absolute if the directory is there; the tokenizer's, too
  std::string served_model_name;
  // These three are from config.json, and so are the token ids below.
  std::string model_type;
  std::vector<std::string> architectures;
  int32_t bos_token_id = 0;  // 0 also if there is none
  int32_t pad_token_id = 0;
  std::vector<int32_t> eos_token_ids;
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;
  std::string engine_id;  // made anew in each process
  std::string kv_dtype;   // "bf16", "fp8", "float32"
  uint32_t block_tokens = 0;
  std::string policy;
  // Sequences, or prompts, that the node works on at once.
  uint32_t max_running = 0;
  std::string version;
  absl::Time started;
};

// Returns the facts from `directory`, its `config.json` and the loaded model. The caller sets role,
// max_running, policy and version. An empty `served_model_name` stands for the directory's. Returns
// the errors of ReadJsonFile.
absl::StatusOr<NodeInfo> MakeNodeInfo(const std::string& directory,
                                      const std::string& served_model_name, const Model& model);

// The facts that change.
struct NodeLoad {
  uint32_t running = 0;
  uint32_t waiting = 0;
  int64_t used_tokens = 0;
  int64_t capacity_tokens = 0;
  double usage = 0;              // in [0, 1], for the cache kind that is fullest
  double tokens_per_second = 0;  // decoded tokens
  bool draining = false;
};

// Asks for the load. The answer comes once, maybe later and on another thread.
using LoadSource = std::function<void(std::function<void(const NodeLoad&)>)>;

// Returns for example "2026-11-21T10:00:00Z".
std::string IsoTime(absl::Time time);

}  // namespace sluice
