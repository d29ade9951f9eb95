#include "src/model/decoder_model.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/rank_group.h"
#include "src/model/rope.h"
#include "src/model/tensor_list.h"

namespace sluice {

DecoderModel::DecoderModel(const Options& options, const ModelConfig& config, CacheLayout layout,
                           int rope_dim, std::string fingerprint,
                           std::unique_ptr<WeightSource> source, Device* device)
    : whole_(config),
      shard_(*ShardOf(config, options.expert_parallel > 1 ? 0 : options.rank,
                      options.tensor_parallel)),
      config_(PartOf(config, shard_)),
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
      workspace_(device),
      ranks_(options.ranks) {
  SLUICE_CHECK(ranks_ == nullptr ||
               (ranks_->size() == std::max(shard_.size, options.expert_parallel) &&
                ranks_->rank() == options.rank));
}

int DecoderModel::widest_ffn() const {
  if (!config_.latent.has_value()) return config_.intermediate_size;
  const LatentConfig& latent = *config_.latent;
  return std::max(latent.dense_layers > 0 ? config_.intermediate_size : 0,
                  latent.experts.shared_size());
}

absl::Status DecoderModel::Initialise() {
  WeightLoader loader(device_, source_.get(), &kept_);
  const int hidden = config_.hidden_size;
  SLUICE_RETURN_IF_ERROR(LoadEnds(loader));
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
  if (!shard_.whole()) SLUICE_RETURN_IF_ERROR(AllocateGathers());
  return AllocateLayers(workspace_);
}

absl::Status DecoderModel::LoadEnds(WeightLoader& loader) {
  const int hidden = config_.hidden_size, vocabulary = config_.vocab_size;
  SLUICE_ASSIGN_OR_RETURN(
      head_, loader.Matrix({{HeadTensor(config_), vocabulary, shard_.vocabulary}}, hidden));
  // A rank of several has other elements of the embedding than of the head.
  if (!config_.tie_word_embeddings || !shard_.whole()) {
    SLUICE_ASSIGN_OR_RETURN(embedding_,
                            loader.Matrix({{kEmbeddingTensor, vocabulary}}, hidden, shard_.hidden));
  }
  SLUICE_ASSIGN_OR_RETURN(final_norm_, loader.Vectors({{kFinalNormTensor, hidden}}));
  return absl::OkStatus();
}

absl::Status DecoderModel::AllocateGathers() {
  const int64_t own = std::max(int64_t{max_rows_} * shard_.hidden.count,
                               int64_t{max_logits_} * shard_.vocabulary_step);
  SLUICE_RETURN_IF_ERROR(workspace_.Allocate(&own_columns_, own, 4, "a rank's columns"));
  SLUICE_RETURN_IF_ERROR(
      workspace_.Allocate(&gathered_, own * shard_.size, 4, "all ranks' columns"));
  SLUICE_RETURN_IF_ERROR(workspace_.Allocate(&all_rows_, shard_.size, 4, "numbers of rows"));
  const std::unique_ptr<Stream> stream = device_->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = device_->NewEvent();
  stream->Fill(all_rows_.data(), 0x7F, all_rows_.bytes());
  stream->Record(*done);
  done->Wait();
  if (ranks_ == nullptr) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(ranks_->Register(residual_.data(), residual_.bytes()));
  SLUICE_RETURN_IF_ERROR(ranks_->Register(own_columns_.data(), own_columns_.bytes()));
  return ranks_->Register(gathered_.data(), gathered_.bytes());
}

void DecoderModel::AddRanks(Stream& stream, float* sums, int32_t rows) {
  if (shard_.whole()) return;
  SLUICE_CHECK(ranks_ != nullptr, "a divided model computes with its ranks");
  ranks_->AllReduce(stream, sums, sums, int64_t{rows} * config_.hidden_size, DType::kFloat32);
}

void DecoderModel::GatherColumns(Stream& stream, const float* in, float* out, int32_t rows,
                                 int step, int all) {
  SLUICE_CHECK(ranks_ != nullptr, "a divided model computes with its ranks");
  // Every rank gives as many bytes; a part with fewer columns lies at the front of its place.
  ranks_->AllGather(stream, in, gathered_.data(), static_cast<size_t>(rows) * size_t(step) * 4);
  const int last = all - (shard_.size - 1) * step;
  kernels::TransferParams move{};
  move.source = gathered_.data();
  move.target = out;
  move.source_stride = int64_t{rows} * step * 4;
  move.target_stride = int64_t{step} * 4;
  move.source_pitch = move.target_stride;
  move.target_pitch = int64_t{all} * 4;
  move.counts = all_rows_.as<int32_t>();
  move.lists = last == step ? shard_.size : shard_.size - 1;
  move.capacity = rows;
  move.unit_bytes = step * 4;
  kernels_.Transfer(stream, move);
  if (last == step) return;
  move.source = gathered_.as<uint8_t>() + move.source_stride * (shard_.size - 1);
  move.target = out + int64_t{shard_.size - 1} * step;
  move.source_pitch = int64_t{last} * 4;
  move.unit_bytes = last * 4;
  move.lists = 1;
  kernels_.Transfer(stream, move);
}

absl::StatusOr<DenseFfn> DecoderModel::LoadFfn(WeightLoader& loader, const std::string& prefix,
                                               int inner, bool bias) {
  const int hidden = config_.hidden_size;
  const ShardPart part = shard_.whole() ? ShardPart{0, inner} : shard_.inner;
  DenseFfn ffn;
  SLUICE_ASSIGN_OR_RETURN(ffn.gate_up, loader.Matrix({{prefix + ".gate_proj.weight", inner, part},
                                                      {prefix + ".up_proj.weight", inner, part}},
                                                     hidden));
  SLUICE_ASSIGN_OR_RETURN(ffn.down,
                          loader.Matrix({{prefix + ".down_proj.weight", hidden}}, inner, part));
  if (!bias) return ffn;
  SLUICE_ASSIGN_OR_RETURN(ffn.gate_up_bias,
                          loader.Vectors({{prefix + ".gate_proj.bias", inner, part},
                                          {prefix + ".up_proj.bias", inner, part}}));
  if (!adds_residual()) return ffn;
  SLUICE_ASSIGN_OR_RETURN(ffn.down_bias, loader.Vectors({{prefix + ".down_proj.bias", hidden}}));
  return ffn;
}

void DecoderModel::Begin(Stream& stream, const StepInputs& in) {
  SLUICE_CHECK(in.rows <= max_rows_ && in.logit_count <= max_logits_);
  float* const residual = residual_.as<float>();
  float* const own = shard_.whole() ? residual : own_columns_.as<float>();
  Embed(stream, in.tokens, in.token_stride, in.slots, in.positions, in.rows, own);
  if (!shard_.whole()) {
    const int columns = shard_.hidden.count;
    GatherColumns(stream, own, residual, in.rows, columns, config_.hidden_size);
  }
  RopeAngles(stream, in.positions, in.rows);
}

void DecoderModel::Embed(Stream& stream, const int32_t* tokens, int64_t token_stride,
                         const int32_t* slots, const int32_t* positions, int32_t rows, float* out) {
  kernels::EmbeddingParams embedding{};
  embedding.tokens = tokens;
  embedding.token_stride = token_stride;
  embedding.slots = slots;
  embedding.positions = positions;
  embedding.table = embedding_.matrix.n > 0 ? embedding_.matrix : head_.matrix;
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
               /*accumulate=*/adds_residual());
  AddRanks(stream, Residual(rows), rows.count);
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
  float* const own = shard_.whole() ? logits : own_columns_.as<float>();
  ops_.Product(stream, head_input_.data(), head, DeviceVector{}, own, count, count,
               /*accumulate=*/false);
  if (shard_.whole()) return;
  GatherColumns(stream, own, logits, count, shard_.vocabulary_step, config_.vocab_size);
}

}  // namespace sluice
