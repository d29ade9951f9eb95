// The part of a model's config that is particular to the DeepSeek-V3 family: multi-head latent
// attention (MLA), the indexer of sparse attention (DSA) and experts (MoE). These are plain values,
// for any thread.
#pragma once

#include <optional>

namespace sluice {

// The indexer scores every earlier token, and a row attends to the best `top_k` (DeepSeek-V3.2-Exp,
// section 2.1). Its keys have kernels::kIndexDim elements.
struct IndexerConfig {
  int heads = 0;
  int top_k = 0;
};

// Experts: a sigmoid router with a correction bias and grouped choice (DeepSeek-V3, arXiv
// 2412.19437, section 2.1.2), and shared experts, which are one dense FFN of `shared` times the
// width.
struct ExpertConfig {
  int routed = 0;
  int shared = 0;     // may be 0
  int per_token = 0;  // at most top_groups * routed / groups
  int groups = 0;     // divides routed
  int top_groups = 0;
  int intermediate = 0;  // width of one expert
  bool normalise = false;
  float scaling = 1.0f;

  int shared_size() const { return shared * intermediate; }
};

struct LatentConfig {
  int q_rank = 0;           // q_lora_rank
  int rank = 0;             // kv_lora_rank: latent values of an entry
  int nope_dim = 0;         // qk_nope_head_dim
  int rope_dim = 0;         // qk_rope_head_dim
  int v_dim = 0;            // v_head_dim
  float softmax_scale = 0;  // (nope_dim + rope_dim)^-1/2 times the square of yarn's mscale
  std::optional<IndexerConfig> indexer;  // none: rows attend to everything
  ExpertConfig experts;
  int dense_layers = 0;       // first layers that have a dense FFN of intermediate_size, no experts
  int next_token_layers = 0;  // further layers of a checkpoint, for drafting; see DraftTensors
  bool fp8_weights = false;   // e4m3 with a scale for each 128 x 128 block

  int qk_dim() const { return nope_dim + rope_dim; }
  int entry_dim() const { return rank + rope_dim; }
};

}  // namespace sluice
