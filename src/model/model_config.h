// ModelConfig is what a Hugging Face directory says about its model, checked. It is a plain value,
// for any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model/latent_config.h"
#include "src/model/rope.h"

namespace sluice {

struct ModelConfig {
  std::string name;          // the directory's last component, for people to read
  std::string architecture;  // "llama", "qwen2", "qwen3", "deepseek_v3", "deepseek_v32"
  int hidden_size = 0;
  int intermediate_size = 0;  // width of dense FFNs
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;  // divides heads
  // A multiple of 16, at most 256, and not always hidden_size / heads. With latent caches it is
  // that of queries and keys.
  int head_dim = 0;
  int vocab_size = 0;
  int max_position_embeddings = 0;
  float rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of every q and k head before RoPE
  RopeConfig rope;
  // Set for the DeepSeek-V3 family, whose caches are latent entries. The fields of attention heads
  // above (kv_heads, biases, qk_norm) do not apply to it.
  std::optional<LatentConfig> latent;
  // Taken from generation_config.json, else from config.json. Sorted, without repeats; may be
  // empty.
  std::vector<int32_t> eos_token_ids;

  int q_size() const { return heads * head_dim; }
  int kv_size() const { return kv_heads * head_dim; }
};

// Returns the supported architectures as text: "llama, qwen2, ...".
std::string SupportedArchitectures();

// Reads DIR/config.json, and DIR/generation_config.json for the EOS ids only (its sampling defaults
// do not apply). An error is one sentence that names the file, the key, what was expected and what
// was found:
//   NOT_FOUND         no directory, no config.json
//   INVALID_ARGUMENT  not JSON, a key is missing, of the wrong type or out of range
//   UNIMPLEMENTED     an architecture or an option that is not supported
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

}  // namespace sluice
