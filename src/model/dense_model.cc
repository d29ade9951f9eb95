#include "src/model/dense_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/model/decoder_model.h"
#include "src/model/tensor_list.h"
#include "src/model/weight_loader.h"

namespace sluice {
namespace {

using kernels::DType;

struct Layer {
  DeviceVector input_norm, post_attention_norm, q_norm, k_norm;
  Weight qkv, o;
  DeviceVector qkv_bias, o_bias;
  DenseFfn ffn;
};

class DenseModel : public DecoderModel {
 public:
  DenseModel(const Options& options, const ModelConfig& config, std::string fingerprint,
             std::unique_ptr<WeightSource> source, Device* device)
      : DecoderModel(options, config,
                     DenseCacheLayout(
                         PartOf(config, *ShardOf(config, options.rank, options.tensor_parallel)),
                         options.kv_dtype, options.block_tokens),
                     config.head_dim, std::move(fingerprint), std::move(source), device),
        keeps_drift_(options.look_ahead) {}

  void Forward(Stream& stream, const StepInputs& inputs, AttentionPolicy& policy) override;

 private:
  absl::Status LoadLayers(WeightLoader& loader) override;
  absl::Status AllocateLayers(Workspace& workspace) override;
  // Enqueue the stages of a layer, over a range of the step's rows.
  void Project(Stream& stream, int layer, const StepInputs& in, RowRange rows,
               KvAttention& attention);
  void Attend(Stream& stream, int layer, const StepInputs& in, RowRange rows,
              KvAttention& attention);
  // Returns whether the policy gets the queries of `layer` before that layer begins.
  bool LooksAhead(int layer, const StepInputs& in, const KvAttention& attention) const {
    return in.decode_rows > 0 && layer < config_.layers && attention.LooksAhead(layer);
  }
  // Returns whether the input of `layer` or, with `ffn`, the residual before its FFN is the source
  // of the queries of layer `target`.
  bool IsSource(int layer, bool ffn, int target, const StepInputs& in,
                const KvAttention& attention) const {
    const bool early = attention.LooksEarly() && target >= 2;
    return LooksAhead(target, in, attention) && ffn == early && layer + (early ? 2 : 1) == target;
  }
  // Returns how the norm of a residual prepares what LookAhead(target) reads.
  kernels::AheadNormParams AheadNorm(int target, const StepInputs& in,
                                     const KvAttention& attention) const;
  // Gives the policy these queries, on a branch that leaves the stream here. They are made from the
  // residual whose norm AheadInput(layer) has.
  void LookAhead(Stream& trunk, int layer, const StepInputs& in, KvAttention& attention);
  // Returns the input of LookAhead, [decode rows][hidden]. The next layer's is written while this
  // layer's may still be read. That of the layer after next is written after this layer's Attend,
  // and so after its Ahead.
  void* AheadInput(int layer) const {
    return ops_.Activation(ahead_normed_, int64_t{layer % 2} * predicted_rows_,
                           config_.hidden_size);
  }
  // Returns the drift from the source of a layer's queries to its input
  // (kernels::AheadNormParams), that of slot 0.
  float* Drift(int layer) const {
    return drift_.as<float>() + int64_t{layer} * config_.hidden_size;
  }
  // Returns where the residual lies that the queries of a layer were predicted from. A norm that is
  // the source of one layer and the end of another's drift has one such place for both.
  float* Before(int layer, const KvAttention& attention) const {
    const int64_t at = attention.LooksEarly() ? layer % 2 : 0;
    return before_.as<float>() + at * predicted_rows_ * config_.hidden_size;
  }
  bool FollowsDrift(const StepInputs& in, const KvAttention& attention) const {
    return keeps_drift_ && attention.FollowsDrift() && in.numbers != nullptr;
  }
  void SetDriftRows(const StepInputs& in, kernels::AheadNormParams* ahead) const {
    ahead->rows = in.decode_rows;
    ahead->slots = in.slots;
    ahead->numbers = in.numbers;
    ahead->slot_stride = int64_t{config_.layers} * config_.hidden_size;
  }
  float AttentionScale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim)); }
  void Ffn(Stream& stream, int layer, const StepInputs& in, RowRange rows, KvAttention& attention);
  int qkv_size() const { return config_.q_size() + 2 * config_.kv_size(); }

  const bool keeps_drift_;
  std::vector<Layer> layers_;
  Buffer qkv_;       // float32 [rows][q + k + v]
  Buffer attended_;  // activation [rows][q]
  // The buffers that LookAhead reads and writes, for the decode rows.
  Buffer ahead_normed_;  // activation [2][predicted_rows_][hidden], by the layer's parity
  Buffer predicted_;     // float32 [predicted_rows_][q]
  Buffer before_;        // float32 [2][predicted_rows_][hidden], by the layer's parity: its source
  Buffer drift_;         // float32 [slots][layers][hidden]
  Buffer partial_;       // float32 [partial_rows_][heads * (head_dim + 1)]
  int64_t partial_rows_ = 0;
  int predicted_rows_ = 0;
};

absl::Status DenseModel::LoadLayers(WeightLoader& loader) {
  const int hidden = config_.hidden_size, dim = config_.head_dim;
  const int q = whole_.q_size(), kv = whole_.kv_size();
  const ShardPart q_part{shard_.heads.first * dim, shard_.heads.count * dim};
  const ShardPart kv_part{shard_.kv_heads.first * dim, shard_.kv_heads.count * dim};
  for (int i = 0; i < config_.layers; ++i) {
    const auto name = [i](const char* suffix) { return LayerTensor(i, suffix); };
    Layer layer;
    SLUICE_ASSIGN_OR_RETURN(layer.input_norm,
                            loader.Vectors({{name("input_layernorm.weight"), hidden}}));
    SLUICE_ASSIGN_OR_RETURN(layer.post_attention_norm,
                            loader.Vectors({{name("post_attention_layernorm.weight"), hidden}}));
    SLUICE_ASSIGN_OR_RETURN(layer.qkv,
                            loader.Matrix({{name("self_attn.q_proj.weight"), q, q_part},
                                           {name("self_attn.k_proj.weight"), kv, kv_part},
                                           {name("self_attn.v_proj.weight"), kv, kv_part}},
                                          hidden));
    SLUICE_ASSIGN_OR_RETURN(layer.o,
                            loader.Matrix({{name("self_attn.o_proj.weight"), hidden}}, q, q_part));
    SLUICE_ASSIGN_OR_RETURN(
        layer.ffn, LoadFfn(loader, name("mlp"), whole_.intermediate_size, config_.mlp_bias));
    if (config_.qk_norm) {
      SLUICE_ASSIGN_OR_RETURN(
          layer.q_norm, loader.Vectors({{name("self_attn.q_norm.weight"), config_.head_dim}}));
      SLUICE_ASSIGN_OR_RETURN(
          layer.k_norm, loader.Vectors({{name("self_attn.k_norm.weight"), config_.head_dim}}));
    }
    if (config_.qkv_bias) {
      SLUICE_ASSIGN_OR_RETURN(layer.qkv_bias,
                              loader.Vectors({{name("self_attn.q_proj.bias"), q, q_part},
                                              {name("self_attn.k_proj.bias"), kv, kv_part},
                                              {name("self_attn.v_proj.bias"), kv, kv_part}}));
    }
    if (config_.o_bias && adds_residual()) {
      SLUICE_ASSIGN_OR_RETURN(layer.o_bias,
                              loader.Vectors({{name("self_attn.o_proj.bias"), hidden}}));
    }
    layers_.push_back(std::move(layer));
  }
  return absl::OkStatus();
}

absl::Status DenseModel::AllocateLayers(Workspace& workspace) {
  const int64_t act = ops_.activation_bytes();
  const int64_t rows = max_rows_, hidden = config_.hidden_size;
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&qkv_, rows, qkv_size() * 4, "queries, keys and values"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&attended_, rows, config_.q_size() * act, "attention results"));
  // A step that has only decode rows may be padded.
  predicted_rows_ = std::min(max_rows_, std::max(max_logits_, device_->RowBucket(max_logits_)));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&ahead_normed_, 2 * predicted_rows_, hidden * act, "normed activations"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&predicted_, predicted_rows_, config_.q_size() * 4, "predicted queries"));
  if (keeps_drift_) {
    SLUICE_RETURN_IF_ERROR(workspace.Allocate(&before_, 2 * predicted_rows_, hidden * 4,
                                              "residuals of the look-ahead"));
    SLUICE_RETURN_IF_ERROR(workspace.Allocate(&drift_, max_logits_, config_.layers * hidden * 4,
                                              "the drift of the look-ahead"));
  }
  const int64_t entry = int64_t{config_.heads} * (config_.head_dim + 1) * 4;
  partial_rows_ = kernels_.AttentionScratchBytes({max_logits_, config_.heads, config_.kv_heads,
                                                  config_.head_dim, max_context_, sequence_rows_}) /
                  entry;
  return workspace.Allocate(&partial_, partial_rows_, entry, "partial attention results");
}

void DenseModel::Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) {
  const RowRange all{0, in.rows, in.decode_rows};
  KvAttention* const attention = policy.kv_attention();
  SLUICE_CHECK(attention != nullptr, policy.name(), " attends to keys and values");
  Begin(stream, in);
  if (LooksAhead(0, in, *attention)) {
    kernels_.RmsNorm(stream, NormOf(residual_.as<float>(), layers_[0].input_norm, AheadInput(0),
                                    in.decode_rows));
    LookAhead(stream, 0, in, *attention);
  }
  for (int layer = 0; layer < config_.layers; ++layer) {
    Project(stream, layer, in, all, *attention);
    Attend(stream, layer, in, all, *attention);
    Ffn(stream, layer, in, all, *attention);
  }
  Logits(stream, in);
  stream.After(stream.Branch(AttentionPolicy::kAheadBranch));
  policy.EndStep(stream);
}

void DenseModel::Project(Stream& stream, int layer, const StepInputs& in, RowRange rows,
                         KvAttention& attention) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  const int64_t hidden = config_.hidden_size;
  void* normed = ops_.Activation(normed_, rows.begin, hidden);
  float* qkv = qkv_.as<float>() + int64_t{rows.begin} * qkv_size();
  // The residual changes before the end of the layer, so the input from which the next layer's
  // queries are predicted is made here.
  kernels::RmsNormParams norm = NormOf(Residual(rows), w.input_norm, normed, rows.count);
  const bool looks_ahead = IsSource(layer, /*ffn=*/false, layer + 1, in, attention);
  if (looks_ahead) norm.ahead = AheadNorm(layer + 1, in, attention);
  // If this layer's queries were predicted, the residual that they were predicted from is in
  // Before(layer), and the drift can be measured.
  if (layer > 0 && LooksAhead(layer, in, attention) && FollowsDrift(in, attention)) {
    SetDriftRows(in, &norm.ahead);
    norm.ahead.drift_before = Drift(layer);
    norm.ahead.before = Before(layer, attention);
  }
  kernels_.RmsNorm(stream, norm);
  if (looks_ahead) LookAhead(stream, layer + 1, in, attention);
  ops_.Product(stream, normed, w.qkv, w.qkv_bias, qkv, rows.count, rows.decode,
               /*accumulate=*/false);

  kernels::RopeAppendParams append{};
  append.qkv = qkv;
  append.q_norm = w.q_norm.data();
  append.k_norm = w.k_norm.data();
  append.cos_sin = CosSin(rows.begin);
  append.slots = in.slots + rows.begin;
  append.positions = in.positions + rows.begin;
  append.rows = rows.count;
  append.heads = config_.heads;
  append.epsilon = config_.rms_norm_eps;
  append.decode_rows = rows.decode;
  attention.Append(stream, layer, append);
}

kernels::AheadNormParams DenseModel::AheadNorm(int target, const StepInputs& in,
                                               const KvAttention& attention) const {
  SLUICE_CHECK(in.decode_rows <= predicted_rows_, "one decode row of a sequence in a step");
  kernels::AheadNormParams ahead;
  ahead.weight = layers_[static_cast<size_t>(target)].input_norm.data();
  ahead.out = AheadInput(target);
  ahead.rows = in.decode_rows;
  if (FollowsDrift(in, attention)) {
    SetDriftRows(in, &ahead);
    ahead.drift = Drift(target);
    ahead.before = Before(target, attention);
  }
  return ahead;
}

void DenseModel::LookAhead(Stream& trunk, int layer, const StepInputs& in, KvAttention& attention) {
  Stream& stream = trunk.Branch(AttentionPolicy::kAheadBranch);
  stream.After(trunk);
  const Layer& w = layers_[static_cast<size_t>(layer)];
  // The rows for the queries, in the matrix that makes queries, keys and values.
  Weight query;
  query.matrix = w.qkv.matrix;
  query.matrix.n = config_.q_size();
  ops_.Product(stream, AheadInput(layer), query, w.qkv_bias, predicted_.as<float>(), in.decode_rows,
               in.decode_rows, /*accumulate=*/false);

  kernels::RopeAppendParams rope{};
  rope.qkv = predicted_.as<float>();
  rope.q_norm = w.q_norm.data();
  rope.cos_sin = CosSin(0);
  rope.slots = in.slots;
  rope.positions = in.positions;
  rope.cache.head_dim = config_.head_dim;
  rope.rows = in.decode_rows;
  rope.decode_rows = in.decode_rows;
  rope.heads = config_.heads;
  rope.epsilon = config_.rms_norm_eps;
  kernels_.RopeAppend(stream, rope);
  attention.Ahead(stream, layer,
                  {predicted_.as<float>(), config_.q_size(), in.slots, in.positions, in.decode_rows,
                   config_.heads, AttentionScale()});
}

void DenseModel::Attend(Stream& stream, int layer, const StepInputs& in, RowRange rows,
                        KvAttention& attention) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  kernels::AttentionParams params{};
  params.q = qkv_.as<float>() + int64_t{rows.begin} * qkv_size();
  params.q_stride = qkv_size();
  params.slots = in.slots + rows.begin;
  params.positions = in.positions + rows.begin;
  params.out = ops_.Activation(attended_, rows.begin, config_.q_size());
  params.partial = partial_.as<float>();
  params.partial_rows = partial_rows_;
  params.rows = rows.count;
  params.decode_rows = rows.decode;
  params.heads = config_.heads;
  params.scale = AttentionScale();
  params.out_type = kernels_.activation_type();
  params.sequence_rows = sequence_rows_;
  attention.Attend(stream, layer, params);
  ops_.Product(stream, params.out, w.o, w.o_bias, Residual(rows), rows.count, rows.decode,
               /*accumulate=*/adds_residual());
  AddRanks(stream, Residual(rows), rows.count);
}

void DenseModel::Ffn(Stream& stream, int layer, const StepInputs& in, RowRange rows,
                     KvAttention& attention) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  void* normed = ops_.Activation(normed_, rows.begin, config_.hidden_size);
  kernels::RmsNormParams norm = NormOf(Residual(rows), w.post_attention_norm, normed, rows.count);
  const bool looks_ahead = IsSource(layer, /*ffn=*/true, layer + 2, in, attention);
  if (looks_ahead) norm.ahead = AheadNorm(layer + 2, in, attention);
  kernels_.RmsNorm(stream, norm);
  if (looks_ahead) LookAhead(stream, layer + 2, in, attention);
  RunFfn(stream, w.ffn, normed, config_.intermediate_size, rows);
}

}  // namespace

CacheLayout DenseCacheLayout(const ModelConfig& config, DType kv_dtype, int block_tokens) {
  CacheKind kv;
  kv.name = "kv";
  kv.element_type = kv_dtype;
  kv.heads = config.kv_heads;
  kv.block_tokens = block_tokens;
  kv.SetEqualParts(2, 2 * config.head_dim * SizeOf(kv_dtype));
  return {config.layers, {kv}};
}

absl::StatusOr<std::unique_ptr<Model>> NewDenseModel(const Model::Options& options,
                                                     const ModelConfig& config,
                                                     std::string fingerprint,
                                                     std::unique_ptr<WeightSource> source,
                                                     Device* device) {
  SLUICE_RETURN_IF_ERROR(device->kernels().Check(
      {config.hidden_size, config.vocab_size, options.block_tokens, config.head_dim}));
  auto model = std::make_unique<DenseModel>(options, config, std::move(fingerprint),
                                            std::move(source), device);
  SLUICE_RETURN_IF_ERROR(model->Initialise());
  return model;
}

}  // namespace sluice
