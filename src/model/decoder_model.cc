#include "src/model/decoder_model.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/model/rope.h"
#include "src/model/tensor_list.h"

namespace sluice {

DecoderModel::DecoderModel(const Options& options, const ModelConfig& config, CacheLayout layout,
                           int rope_dim, std::string fingerprint,
                           std::unique_ptr<WeightSource> source, Device* device)
    : config_(config),
      max_context_(options.max_context > 0 ? options.max_context : config.max_position_embeddings),
      max_rows_(options.max_rows),
      max_logits_(options.max_logits),
      sequence_rows_(options.sequence_rows),
      device_(device),
      kernels_(device->kernels()),
      ops_(&device->kernels()),
      layout_(std::move(layout)),
      rope_dim_(rope_dim),
      fingerprint_(std::move(fingerprint)),
      source_(std::move(source)),
      workspace_(device) {}

int DecoderModel::widest_ffn() const {
  if (!config_.latent.has_value()) return config_.intermediate_size;
  const LatentConfig& latent = *config_.latent;
  return std::max(latent.dense_layers > 0 ? config_.intermediate_size : 0,
                  latent.experts.shared_size());
}

absl::Status DecoderModel::Initialise() {
  WeightLoader loader(device_, source_.get(), &kept_);
  const int hidden = config_.hidden_size;
  SLUICE_ASSIGN_OR_RETURN(head_,
                          loader.Matrix({{HeadTensor(config_), config_.vocab_size}}, hidden));
  if (!config_.tie_word_embeddings) {
    SLUICE_ASSIGN_OR_RETURN(embedding_,
                            loader.Matrix({{kEmbeddingTensor, config_.vocab_size}}, hidden));
  }
  SLUICE_ASSIGN_OR_RETURN(final_norm_, loader.Vectors({{kFinalNormTensor, hidden}}));
  SLUICE_RETURN_IF_ERROR(LoadLayers(loader));
  SLUICE_ASSIGN_OR_RETURN(inv_freq_, loader.Upload(RopeInverseFrequencies(config_.rope, rope_dim_),
                                                   "RoPE frequencies"));
  weight_bytes_ = loader.bytes();
  if (kept_.empty()) source_.reset();  // nothing points into the files any more

  const int64_t act = ops_.activation_bytes(), inner = widest_ffn();
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&residual_, max_rows_, int64_t{hidden} * 4, "the residual"));
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&normed_, max_rows_, hidden * act, "normed activations"));
  SLUICE_RETURN_IF_ERROR(workspace_.Allocate(&gate_up_, max_rows_, 2 * inner * 4, "gate and up"));
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&activated_, max_rows_, inner * act, "gated activations"));
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&cos_sin_, max_rows_, int64_t{rope_dim_} * 4, "RoPE angles"));
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&head_input_, max_logits_, hidden * act, "the head's input"));
  return AllocateLayers(workspace_);
}

absl::StatusOr<DenseFfn> DecoderModel::LoadFfn(WeightLoader& loader, const std::string& prefix,
                                               int inner, bool bias) {
  const int hidden = config_.hidden_size;
  DenseFfn ffn;
  SLUICE_ASSIGN_OR_RETURN(ffn.gate_up, loader.Matrix({{prefix + ".gate_proj.weight", inner},
                                                      {prefix + ".up_proj.weight", inner}},
                                                     hidden));
  SLUICE_ASSIGN_OR_RETURN(ffn.down, loader.Matrix({{prefix + ".down_proj.weight", hidden}}, inner));
  if (!bias) return ffn;
  SLUICE_ASSIGN_OR_RETURN(ffn.gate_up_bias, loader.Vectors({{prefix + ".gate_proj.bias", inner},
                                                            {prefix + ".up_proj.bias", inner}}));
  SLUICE_ASSIGN_OR_RETURN(ffn.down_bias, loader.Vectors({{prefix + ".down_proj.bias", hidden}}));
  return ffn;
}

void DecoderModel::Begin(Stream& stream, const StepInputs& in) {
  SLUICE_CHECK(in.rows <= max_rows_ && in.logit_count <= max_logits_);
  Embed(stream, in.tokens, in.token_stride, in.slots, in.positions, in.rows, residual_.as<float>());
  RopeAngles(stream, in.positions, in.rows);
}

void DecoderModel::Embed(Stream& stream, const int32_t* tokens, int64_t token_stride,
                         const int32_t* slots, const int32_t* positions, int32_t rows, float* out) {
  kernels::EmbeddingParams embedding{};
  embedding.tokens = tokens;
  embedding.token_stride = token_stride;
  embedding.slots = slots;
  embedding.positions = positions;
  embedding.table = config_.tie_word_embeddings ? head_.matrix : embedding_.matrix;
  embedding.out = out;
  embedding.rows = rows;
  kernels_.Embedding(stream, embedding);
}

void DecoderModel::RopeAngles(Stream& stream, const int32_t* positions, int32_t rows) {
  kernels::RopeTableParams rope{};
  rope.positions = positions;
  rope.inv_freq = inv_freq_.data();
  rope.scale = RopeAttentionFactor(config_.rope);
  rope.cos_sin = cos_sin_.as<float>();
  rope.rows = rows;
  rope.half_dim = rope_dim_ / 2;
  kernels_.RopeTable(stream, rope);
}

void DecoderModel::RunFfn(Stream& stream, const DenseFfn& ffn, const void* x, int inner,
                          RowRange rows) {
  float* gate_up = gate_up_.as<float>() + int64_t{rows.begin} * 2 * inner;
  void* activated = ops_.Activation(activated_, rows.begin, inner);
  ops_.Product(stream, x, ffn.gate_up, ffn.gate_up_bias, gate_up, rows.count, rows.decode,
               /*accumulate=*/false);
  ops_.SiluMul(stream, gate_up, activated, rows.count, inner);
  ops_.Product(stream, activated, ffn.down, ffn.down_bias, Residual(rows), rows.count, rows.decode,
               /*accumulate=*/true);
}

void DecoderModel::Logits(Stream& stream, const StepInputs& in) {
  LogitsOf(stream, final_norm_, head_, in.logit_rows, in.logit_count, in.logits);
}

void DecoderModel::LogitsOf(Stream& stream, const DeviceVector& norm, const Weight& head,
                            const int32_t* rows, int32_t count, float* logits) {
  if (count == 0) return;
  kernels::RmsNormParams normed = NormOf(residual_.as<float>(), norm, head_input_.data(), count);
  normed.row_index = rows;
  kernels_.RmsNorm(stream, normed);
  // Each of these rows chooses a token, including the last row of a prompt.
  ops_.Product(stream, head_input_.data(), head, DeviceVector{}, logits, count, count,
               /*accumulate=*/false);
}

}  // namespace sluice
