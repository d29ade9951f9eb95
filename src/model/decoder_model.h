// DecoderModel is the part that the decoders of all families share: the residual, the embedding,
// the RoPE angles and the head around their layers. Internal to src/model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/model/layer_operators.h"
#include "src/model/model.h"
#include "src/model/shard.h"
#include "src/model/weight_loader.h"
#include "src/model/weight_source.h"

namespace sluice {

class DecoderModel : public Model {
 public:
  const ModelConfig& config() const override { return config_; }
  const ModelConfig& whole_config() const override { return whole_; }
  Shard shard() const override { return shard_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  const CacheLayout& cache_layout() const override { return layout_; }
  int max_context() const override { return max_context_; }
  int max_rows() const override { return max_rows_; }
  int max_logits() const override { return max_logits_; }
  int64_t weight_bytes() const override { return weight_bytes_; }
  int64_t workspace_bytes() const override { return workspace_.bytes(); }

  // Takes the rank's weights out of the source, and allocates the buffers that steps write. Call it
  // once, before anything else.
  absl::Status Initialise();

 protected:
  // RoPE turns the first `rope_dim` elements. `config` is the whole model's, the layout is the
  // rank's. REQUIRES: ShardOf takes the options.
  DecoderModel(const Options& options, const ModelConfig& config, CacheLayout layout, int rope_dim,
               std::string fingerprint, std::unique_ptr<WeightSource> source, Device* device);

  // Load the family's own weights and allocate its own buffers, one layer after the other.
  virtual absl::Status LoadLayers(WeightLoader& loader) = 0;
  virtual absl::Status AllocateLayers(Workspace& workspace) = 0;

  // Enqueues the residual of the step's rows, from their tokens, and the RoPE angles of their
  // positions.
  void Begin(Stream& stream, const StepInputs& in);
  // Enqueues the embeddings of rows' tokens: out[r] is that of tokens[slots[r] * token_stride +
  // positions[r]], or 0 for a padded row.
  void Embed(Stream& stream, const int32_t* tokens, int64_t token_stride, const int32_t* slots,
             const int32_t* positions, int32_t rows, float* out);
  // Enqueues the RoPE angles of rows' positions.
  void RopeAngles(Stream& stream, const int32_t* positions, int32_t rows);
  // Enqueues the logits that are wanted, from the residual.
  void Logits(Stream& stream, const StepInputs& in);
  // The same through another head. `rows`: [count] rows of the residual.
  void LogitsOf(Stream& stream, const DeviceVector& norm, const Weight& head, const int32_t* rows,
                int32_t count, float* logits);
  absl::StatusOr<DenseFfn> LoadFfn(WeightLoader& loader, const std::string& prefix, int inner,
                                   bool bias);
  // Enqueues residual += FFN(x), where x is activations [rows][hidden]. Uses gate_up_ and
  // activated_.
  void RunFfn(Stream& stream, const DenseFfn& ffn, const void* x, int inner, RowRange rows);
  // Returns the parameters of out = RMSNorm of rows of the residual.
  kernels::RmsNormParams NormOf(const float* x, const DeviceVector& weight, void* out,
                                int32_t rows) const {
    return ops_.NormOf(x, config_.hidden_size, config_.hidden_size, config_.rms_norm_eps, weight,
                       out, rows);
  }
  float* Residual(RowRange rows) const {
    return residual_.as<float>() + int64_t{rows.begin} * config_.hidden_size;
  }
  const DeviceVector& final_norm() const { return final_norm_; }
  // Returns the RoPE angles of a step's rows from `row` on.
  const float* CosSin(int64_t row) const { return cos_sin_.as<float>() + row * rope_dim_; }

  // Enqueues sums = the sum of all ranks' `sums`, float32 [rows][hidden]; nothing where the model
  // is whole.
  void AddRanks(Stream& stream, float* sums, int32_t rows);
  // Returns whether this rank adds what only one may add: the residual, and biases behind a sum.
  bool adds_residual() const { return shard_.rank == 0; }

  const ModelConfig whole_;  // the whole model's
  const Shard shard_;
  const ModelConfig config_;  // this rank's part
  const int max_context_;
  const int max_rows_;
  const int max_logits_;
  const int sequence_rows_;
  Device* const device_;
  KernelSet& kernels_;
  const LayerOperators ops_;
  Buffer residual_;   // float32 [rows][hidden]
  Buffer normed_;     // activation [rows][hidden]
  Buffer gate_up_;    // float32 [rows][2 * widest_ffn()]
  Buffer activated_;  // activation [rows][widest_ffn()]

 private:
  // Returns the width of the widest dense FFN of the model.
  int widest_ffn() const;
  absl::Status LoadEnds(WeightLoader& loader);
  absl::Status AllocateGathers();
  // Enqueues out = the ranks' `in`, side by side: `in` is own_columns_, float32 [rows][columns], of
  // which a rank has `step`, or fewer on the last one, and `out` is [rows][all].
  void GatherColumns(Stream& stream, const float* in, float* out, int32_t rows, int step, int all);

  const CacheLayout layout_;
  const int rope_dim_;
  const std::string fingerprint_;
  std::unique_ptr<WeightSource> source_;
  std::vector<MatrixView> kept_;  // matrices that the kernels read in place, in the checkpoint
  Weight embedding_;              // untied models only; in others the head serves
  Weight head_;
  DeviceVector final_norm_;
  DeviceVector inv_freq_;
  int64_t weight_bytes_ = 0;
  Workspace workspace_;
  Buffer cos_sin_;     // float32 [rows][rope_dim / 2][2]
  Buffer head_input_;  // activation [logits][hidden]
  // The rest is there only where the model is divided.
  RankGroup* const ranks_;
  Buffer own_columns_;  // float32 [rows][the rank's columns]
  Buffer gathered_;     // float32 [ranks][rows][a rank's columns]
  Buffer all_rows_;     // int32 [ranks]: more rows than any step has
};

}  // namespace sluice
