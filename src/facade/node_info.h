// What a node tells gateways of itself, whatever their dialect.
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

// The name of the way in which caches change hands. Gateways pair a prefill with a decode node
// whose connector and block size are the same.
inline constexpr char kConnector[] = "SluiceConnector";

// What stays the same while the node runs.
struct NodeInfo {
  enum class Role { kPrefill, kDecode };
  Role role = Role::kDecode;
  std::string model_path;  // absolute, where the directory is there; the tokenizer's, too
  std::string served_model_name;
  // From config.json.
  std::string model_type;
  std::vector<std::string> architectures;
  int32_t bos_token_id = 0;  // 0: there is none, or it is 0
  int32_t pad_token_id = 0;
  std::vector<int32_t> eos_token_ids;
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;
  std::string engine_id;  // made anew in each process
  std::string kv_dtype;   // "bf16", "fp8", "float32"
  uint32_t block_tokens = 0;
  std::string policy;
  // Sequences, or prompts, that it works on at once.
  uint32_t max_running = 0;
  std::string version;
  absl::Time started;
};

// `directory`, `config.json` in it and the loaded model; role, max_running, policy and version are
// left to the caller. `served_model_name` empty: the directory's. The errors of ReadJsonFile.
absl::StatusOr<NodeInfo> MakeNodeInfo(const std::string& directory,
                                      const std::string& served_model_name, const Model& model);

// What changes.
struct NodeLoad {
  uint32_t running = 0;
  uint32_t waiting = 0;
  int64_t used_tokens = 0;
  int64_t capacity_tokens = 0;
  double usage = 0;              // [0, 1], of the kind of cache that is fullest
  double tokens_per_second = 0;  // decoded
  bool draining = false;
};

// Asks for the load; the answer may come on another thread, later, once.
using LoadSource = std::function<void(std::function<void(const NodeLoad&)>)>;

// "2026-11-21T10:00:00Z".
std::string IsoTime(absl::Time time);

}  // namespace sluice
