// LatentAttentionStage is the attention of a layer of the DeepSeek-V3 family: multi-head latent
// attention in its absorbed form, with the indexer if the model has one (kernels/latent_params.h).
// Internal to src/model.
#pragma once

#include <string>

#include "src/attention/attention_policy.h"
#include "src/model/layer_operators.h"
#include "src/model/model.h"
#include "src/model/weight_loader.h"

namespace sluice {

// Weights of one layer.
struct LatentAttentionWeights {
  // The matrices that multiply the layer's normed input, one below the other: q_a, kv_a, the
  // indexer's wk, and its weights_proj if that has the same form as they.
  Weight input;
  Weight index_weights;  // weights_proj; empty if `input` has it
  DeviceVector q_norm, kv_norm;
  DeviceVector index_norm, index_norm_bias;
  Weight index_q;  // wq_b; empty: there is no indexer
  Weight q_b;
  // Each head's kv_b_proj, folded into queries and results: W_k^T [heads * rank][nope] and
  // W_v [heads * v][rank].
  Weight absorb_k, absorb_v;
  Weight o;
};

class LatentAttentionStage {
 public:
  // REQUIRES: `config` and `ops` outlive this.
  LatentAttentionStage(const ModelConfig& config, DType kv_dtype, const LayerOperators& ops);

  // Without `indexer` the layer's indexer is passed over, if the model has one: what the rows
  // attend to is then for LatentAttention to say.
  absl::StatusOr<LatentAttentionWeights> Load(WeightLoader& loader, int layer, bool indexer) const;
  absl::Status Allocate(Workspace& workspace, int max_rows);

  // Enqueues residual += o(attention(normed)) for some rows of a step. `normed` is activations
  // [rows of the step][hidden], as are `cos_sin` and `residual` of all rows. REQUIRES: where the
  // rows are not all, all are decode rows, and parts of a layer follow one another on one stream.
  void Run(Stream& stream, int layer, const LatentAttentionWeights& weights, const StepInputs& in,
           RowRange rows, const void* normed, const float* cos_sin, float* residual,
           LatentAttention& attention);

 private:
  // Return where each product begins in a row of `projected_`.
  int kv_at() const { return latent_.q_rank; }
  int index_key_at() const { return kv_at() + latent_.entry_dim(); }
  int index_weights_at() const { return index_key_at() + kernels::kIndexDim; }
  // Returns whether the layer has an indexer.
  static bool Indexed(const LatentAttentionWeights& weights) {
    return weights.index_q.matrix.n > 0;
  }
  // Returns the number of elements in a row of `projected_`.
  int projected_size(const LatentAttentionWeights& weights) const { return weights.input.matrix.n; }

  absl::Status LoadAbsorbed(WeightLoader& loader, const std::string& kv_b,
                            LatentAttentionWeights* out) const;
  void Append(Stream& stream, int layer, const LatentAttentionWeights& weights,
              const StepInputs& in, RowRange rows, const float* cos_sin,
              LatentAttention& attention);
  // Enqueues the indexer's queries, from index_heads_ and from the weights of heads, which are in
  // `projected_` or in index_weights_.
  void IndexQueries(Stream& stream, const LatentAttentionWeights& weights, RowRange rows,
                    const float* cos_sin);
  // Enqueues the queries of attention: q_b, absorption and RoPE (stage PreAttn).
  void Queries(Stream& stream, const LatentAttentionWeights& weights, RowRange rows,
               const float* cos_sin);

  const ModelConfig& config_;
  const LatentConfig& latent_;
  const DType kv_dtype_;
  const LayerOperators& ops_;
  Buffer projected_;      // float32 [rows][products of the normed input]
  Buffer q_latent_;       // activation [rows][q_rank], after its norm
  Buffer q_heads_;        // float32 [rows][heads][nope + rope]
  Buffer q_nope_;         // activation [rows][heads][nope]
  Buffer q_;              // activation [rows][heads][rank + rope]
  Buffer attended_;       // activation [rows][heads][rank]
  Buffer values_;         // activation [rows][heads][v]
  Buffer index_heads_;    // float32 [rows][index heads][128]
  Buffer index_q_;        // IndexQueryParams::out
  Buffer index_weights_;  // float32 [rows][index heads], if projected apart
  Buffer head_weights_;   // IndexQueryParams::out_weights
};

}  // namespace sluice
