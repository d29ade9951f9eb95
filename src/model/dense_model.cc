#include "src/model/dense_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/model/rope.h"
#include "src/model/tensor_list.h"
#include "src/model/weight_loader.h"

namespace sluice {
namespace {

using kernels::DType;

// Rows [begin, begin + count) of a step, of which the first `decode` generate.
struct RowRange {
  int32_t begin;
  int32_t count;
  int32_t decode;
};

struct Layer {
  DeviceVector input_norm, post_attention_norm, q_norm, k_norm;
  Weight qkv, o, gate_up, down;
  DeviceVector qkv_bias, o_bias, gate_up_bias, down_bias;
};

class DenseModel : public Model {
 public:
  DenseModel(const Options& options, const ModelConfig& config, std::string fingerprint,
             std::unique_ptr<WeightSource> source, Device* device)
      : config_(config),
        fingerprint_(std::move(fingerprint)),
        max_context_(options.max_context > 0 ? options.max_context
                                             : config.max_position_embeddings),
        max_rows_(options.max_rows),
        max_logits_(options.max_logits),
        device_(device),
        kernels_(device->kernels()),
        source_(std::move(source)) {
    layout_ = DenseCacheLayout(config, options.kv_dtype, options.block_tokens);
  }

  absl::Status LoadWeights();
  absl::Status AllocateWorkspace();

  const ModelConfig& config() const override { return config_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  const CacheLayout& cache_layout() const override { return layout_; }
  int max_context() const override { return max_context_; }
  int max_rows() const override { return max_rows_; }
  int max_logits() const override { return max_logits_; }
  int64_t weight_bytes() const override { return weight_bytes_; }
  int64_t workspace_bytes() const override { return workspace_bytes_; }

  void Forward(Stream& stream, const StepInputs& inputs, AttentionPolicy& policy) override;

 private:
  // The stages of a layer, over a range of the step's rows.
  void Project(Stream& stream, int layer, const StepInputs& in, RowRange rows,
               AttentionPolicy& policy);
  void Attend(Stream& stream, int layer, const StepInputs& in, RowRange rows,
              AttentionPolicy& policy);
  // Whether the policy is given the queries of `layer` before that begins.
  bool LooksAhead(int layer, const StepInputs& in, const AttentionPolicy& policy) const {
    return in.decode_rows > 0 && layer < config_.layers && policy.LooksAhead(layer);
  }
  // Gives them to it, of the residual whose norm AheadInput(layer) has, on a branch that leaves the
  // stream here.
  void LookAhead(Stream& trunk, int layer, const StepInputs& in, AttentionPolicy& policy);
  // [decode rows][hidden]. The next layer's is written while this one's may still be read; the next
  // but one's comes after this layer's Attend, and with that after its Ahead.
  void* AheadInput(int layer) const {
    return Activation(ahead_normed_, int64_t{layer % 2} * predicted_rows_, config_.hidden_size);
  }
  float AttentionScale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim)); }
  void Ffn(Stream& stream, int layer, RowRange rows);
  void Logits(Stream& stream, const StepInputs& in);

  // out = RMSNorm of rows of the residual.
  kernels::RmsNormParams NormOf(const float* x, const int32_t* row_index,
                                const DeviceVector& weight, void* out, int32_t rows) const;
  void Norm(Stream& stream, const float* x, const int32_t* row_index, const DeviceVector& weight,
            void* out, int32_t rows) {
    kernels_.RmsNorm(stream, NormOf(x, row_index, weight, out, rows));
  }
  // y = x W^T + bias, or added to y.
  void Product(Stream& stream, const void* x, const Weight& weight, const DeviceVector& bias,
               float* y, int32_t rows, int32_t decode_rows, bool accumulate);
  float* Residual(RowRange rows) const {
    return residual_.as<float>() + int64_t{rows.begin} * config_.hidden_size;
  }

  absl::Status Workspace(Buffer* buffer, int64_t rows, int64_t row_bytes, const char* what);
  // Activations that feed a product, in the kernels' activation type.
  void* Activation(const Buffer& buffer, int64_t row, int64_t dim) const {
    return buffer.as<uint8_t>() + row * dim * SizeOf(kernels_.activation_type());
  }
  int qkv_size() const { return config_.q_size() + 2 * config_.kv_size(); }

  const ModelConfig config_;
  const std::string fingerprint_;
  const int max_context_;
  const int max_rows_;
  const int max_logits_;
  Device* const device_;
  KernelSet& kernels_;
  CacheLayout layout_;

  std::unique_ptr<WeightSource> source_;
  std::vector<MatrixView> kept_;  // matrices that the kernels read where the checkpoint has them
  Weight embedding_;              // untied models only; else the head serves
  Weight head_;
  DeviceVector final_norm_;
  DeviceVector inv_freq_;
  std::vector<Layer> layers_;
  int64_t weight_bytes_ = 0;
  int64_t workspace_bytes_ = 0;

  Buffer residual_;    // float32 [rows][hidden]
  Buffer normed_;      // activation [rows][hidden]
  Buffer qkv_;         // float32 [rows][q + k + v]
  Buffer attended_;    // activation [rows][q]
  Buffer gate_up_;     // float32 [rows][2 * intermediate]
  Buffer activated_;   // activation [rows][intermediate]
  Buffer cos_sin_;     // float32 [rows][head_dim / 2][2]
  Buffer head_input_;  // activation [logits][hidden]
  // What LookAhead reads and writes, of the decode rows.
  Buffer ahead_normed_;  // activation [2][predicted_rows_][hidden], by a layer's parity
  Buffer predicted_;     // float32 [predicted_rows_][q]
  Buffer partial_;       // float32 [partial_rows_][heads * (head_dim + 1)]
  int64_t partial_rows_ = 0;
  int predicted_rows_ = 0;
};

absl::Status DenseModel::LoadWeights() {
  WeightLoader loader(device_, source_.get(), &kept_);
  const int hidden = config_.hidden_size, inter = config_.intermediate_size;
  const int q = config_.q_size(), kv = config_.kv_size();
  SLUICE_ASSIGN_OR_RETURN(head_,
                          loader.Matrix({{HeadTensor(config_), config_.vocab_size}}, hidden));
  if (!config_.tie_word_embeddings) {
    SLUICE_ASSIGN_OR_RETURN(embedding_,
                            loader.Matrix({{kEmbeddingTensor, config_.vocab_size}}, hidden));
  }
  SLUICE_ASSIGN_OR_RETURN(final_norm_, loader.Vectors({{kFinalNormTensor, hidden}}));
  for (int i = 0; i < config_.layers; ++i) {
    const auto name = [i](const char* suffix) { return LayerTensor(i, suffix); };
    Layer layer;
    SLUICE_ASSIGN_OR_RETURN(layer.input_norm,
                            loader.Vectors({{name("input_layernorm.weight"), hidden}}));
    SLUICE_ASSIGN_OR_RETURN(layer.post_attention_norm,
                            loader.Vectors({{name("post_attention_layernorm.weight"), hidden}}));
    SLUICE_ASSIGN_OR_RETURN(layer.qkv, loader.Matrix({{name("self_attn.q_proj.weight"), q},
                                                      {name("self_attn.k_proj.weight"), kv},
                                                      {name("self_attn.v_proj.weight"), kv}},
                                                     hidden));
    SLUICE_ASSIGN_OR_RETURN(layer.o, loader.Matrix({{name("self_attn.o_proj.weight"), hidden}}, q));
    SLUICE_ASSIGN_OR_RETURN(layer.gate_up, loader.Matrix({{name("mlp.gate_proj.weight"), inter},
                                                          {name("mlp.up_proj.weight"), inter}},
                                                         hidden));
    SLUICE_ASSIGN_OR_RETURN(layer.down,
                            loader.Matrix({{name("mlp.down_proj.weight"), hidden}}, inter));
    if (config_.qk_norm) {
      SLUICE_ASSIGN_OR_RETURN(
          layer.q_norm, loader.Vectors({{name("self_attn.q_norm.weight"), config_.head_dim}}));
      SLUICE_ASSIGN_OR_RETURN(
          layer.k_norm, loader.Vectors({{name("self_attn.k_norm.weight"), config_.head_dim}}));
    }
    if (config_.qkv_bias) {
      SLUICE_ASSIGN_OR_RETURN(layer.qkv_bias,
                              loader.Vectors({{name("self_attn.q_proj.bias"), q},
                                              {name("self_attn.k_proj.bias"), kv},
                                              {name("self_attn.v_proj.bias"), kv}}));
    }
    if (config_.o_bias) {
      SLUICE_ASSIGN_OR_RETURN(layer.o_bias,
                              loader.Vectors({{name("self_attn.o_proj.bias"), hidden}}));
    }
    if (config_.mlp_bias) {
      SLUICE_ASSIGN_OR_RETURN(
          layer.gate_up_bias,
          loader.Vectors({{name("mlp.gate_proj.bias"), inter}, {name("mlp.up_proj.bias"), inter}}));
      SLUICE_ASSIGN_OR_RETURN(layer.down_bias,
                              loader.Vectors({{name("mlp.down_proj.bias"), hidden}}));
    }
    layers_.push_back(std::move(layer));
  }
  SLUICE_ASSIGN_OR_RETURN(
      inv_freq_,
      loader.Upload(RopeInverseFrequencies(config_.rope, config_.head_dim), "RoPE frequencies"));
  weight_bytes_ = loader.bytes();
  if (kept_.empty()) source_.reset();  // nothing points into the files any more
  return absl::OkStatus();
}

absl::Status DenseModel::Workspace(Buffer* buffer, int64_t rows, int64_t row_bytes,
                                   const char* what) {
  SLUICE_ASSIGN_OR_RETURN(
      *buffer, device_->Allocate(MemoryKind::kDevice, static_cast<size_t>(rows * row_bytes), what));
  workspace_bytes_ += rows * row_bytes;
  return absl::OkStatus();
}

absl::Status DenseModel::AllocateWorkspace() {
  const int64_t act = SizeOf(kernels_.activation_type());
  const int64_t rows = max_rows_;
  const int64_t hidden = config_.hidden_size, inter = config_.intermediate_size;
  SLUICE_RETURN_IF_ERROR(Workspace(&residual_, rows, hidden * 4, "the residual"));
  SLUICE_RETURN_IF_ERROR(Workspace(&normed_, rows, hidden * act, "normed activations"));
  SLUICE_RETURN_IF_ERROR(Workspace(&qkv_, rows, qkv_size() * 4, "queries, keys and values"));
  SLUICE_RETURN_IF_ERROR(Workspace(&attended_, rows, config_.q_size() * act, "attention results"));
  SLUICE_RETURN_IF_ERROR(Workspace(&gate_up_, rows, 2 * inter * 4, "gate and up"));
  SLUICE_RETURN_IF_ERROR(Workspace(&activated_, rows, inter * act, "gated activations"));
  SLUICE_RETURN_IF_ERROR(Workspace(&cos_sin_, rows, int64_t{config_.head_dim} * 4, "RoPE angles"));
  SLUICE_RETURN_IF_ERROR(Workspace(&head_input_, max_logits_, hidden * act, "the head's input"));
  // A step of decode rows alone may be padded.
  predicted_rows_ = std::min(max_rows_, std::max(max_logits_, device_->RowBucket(max_logits_)));
  SLUICE_RETURN_IF_ERROR(
      Workspace(&ahead_normed_, 2 * predicted_rows_, hidden * act, "normed activations"));
  SLUICE_RETURN_IF_ERROR(
      Workspace(&predicted_, predicted_rows_, config_.q_size() * 4, "predicted queries"));
  const int64_t entry = int64_t{config_.heads} * (config_.head_dim + 1) * 4;
  partial_rows_ = kernels_.AttentionScratchBytes({max_logits_, config_.heads, config_.kv_heads,
                                                  config_.head_dim, max_context_}) /
                  entry;
  return Workspace(&partial_, partial_rows_, entry, "partial attention results");
}

void DenseModel::Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) {
  SLUICE_CHECK(in.rows <= max_rows_ && in.logit_count <= max_logits_);
  const RowRange all{0, in.rows, in.decode_rows};
  kernels::EmbeddingParams embedding{};
  embedding.tokens = in.tokens;
  embedding.token_stride = in.token_stride;
  embedding.slots = in.slots;
  embedding.positions = in.positions;
  embedding.table = config_.tie_word_embeddings ? head_.matrix : embedding_.matrix;
  embedding.out = residual_.as<float>();
  embedding.rows = in.rows;
  kernels_.Embedding(stream, embedding);

  kernels::RopeTableParams rope{};
  rope.positions = in.positions;
  rope.inv_freq = inv_freq_.data();
  rope.scale = RopeAttentionFactor(config_.rope);
  rope.cos_sin = cos_sin_.as<float>();
  rope.rows = in.rows;
  rope.half_dim = config_.head_dim / 2;
  kernels_.RopeTable(stream, rope);

  if (LooksAhead(0, in, policy)) {
    Norm(stream, residual_.as<float>(), nullptr, layers_[0].input_norm, AheadInput(0),
         in.decode_rows);
    LookAhead(stream, 0, in, policy);
  }
  for (int layer = 0; layer < config_.layers; ++layer) {
    Project(stream, layer, in, all, policy);
    Attend(stream, layer, in, all, policy);
    Ffn(stream, layer, all);
  }
  Logits(stream, in);
  stream.After(stream.Branch(AttentionPolicy::kAheadBranch));
  policy.EndStep(stream);
}

kernels::RmsNormParams DenseModel::NormOf(const float* x, const int32_t* row_index,
                                          const DeviceVector& weight, void* out,
                                          int32_t rows) const {
  kernels::RmsNormParams norm{};
  norm.x = x;
  norm.row_index = row_index;
  norm.weight = weight.data();
  norm.out = out;
  norm.x_stride = config_.hidden_size;
  norm.rows = rows;
  norm.dim = config_.hidden_size;
  norm.epsilon = config_.rms_norm_eps;
  norm.out_type = kernels_.activation_type();
  return norm;
}

void DenseModel::Product(Stream& stream, const void* x, const Weight& weight,
                         const DeviceVector& bias, float* y, int32_t rows, int32_t decode_rows,
                         bool accumulate) {
  kernels::LinearParams linear{};
  linear.x = x;
  linear.w = weight.matrix;
  linear.bias = bias.data();
  linear.y = y;
  linear.rows = rows;
  linear.decode_rows = decode_rows;
  linear.x_type = kernels_.activation_type();
  linear.accumulate = accumulate;
  kernels_.Linear(stream, linear);
}

void DenseModel::Project(Stream& stream, int layer, const StepInputs& in, RowRange rows,
                         AttentionPolicy& policy) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  const int64_t hidden = config_.hidden_size;
  void* normed = Activation(normed_, rows.begin, hidden);
  float* qkv = qkv_.as<float>() + int64_t{rows.begin} * qkv_size();
  // The residual changes before the layer's end: what the next layer's queries are predicted from
  // is kept here.
  kernels::RmsNormParams norm = NormOf(Residual(rows), nullptr, w.input_norm, normed, rows.count);
  const bool looks_ahead = LooksAhead(layer + 1, in, policy);
  if (looks_ahead) {
    SLUICE_CHECK(rows.begin == 0 && in.decode_rows <= predicted_rows_,
                 "one decode row of a sequence in a step");
    norm.also_weight = layers_[static_cast<size_t>(layer) + 1].input_norm.data();
    norm.also_out = AheadInput(layer + 1);
    norm.also_rows = in.decode_rows;
  }
  kernels_.RmsNorm(stream, norm);
  if (looks_ahead) LookAhead(stream, layer + 1, in, policy);
  Product(stream, normed, w.qkv, w.qkv_bias, qkv, rows.count, rows.decode, /*accumulate=*/false);

  kernels::RopeAppendParams append{};
  append.qkv = qkv;
  append.q_norm = w.q_norm.data();
  append.k_norm = w.k_norm.data();
  append.cos_sin = cos_sin_.as<float>() + int64_t{rows.begin} * config_.head_dim;
  append.slots = in.slots + rows.begin;
  append.positions = in.positions + rows.begin;
  append.rows = rows.count;
  append.heads = config_.heads;
  append.epsilon = config_.rms_norm_eps;
  append.decode_rows = rows.decode;
  policy.Append(stream, layer, append);
}

void DenseModel::LookAhead(Stream& trunk, int layer, const StepInputs& in,
                           AttentionPolicy& policy) {
  Stream& stream = trunk.Branch(AttentionPolicy::kAheadBranch);
  stream.After(trunk);
  const Layer& w = layers_[static_cast<size_t>(layer)];
  // The queries' rows of the one matrix that makes queries, keys and values.
  Weight query;
  query.matrix = w.qkv.matrix;
  query.matrix.n = config_.q_size();
  Product(stream, AheadInput(layer), query, w.qkv_bias, predicted_.as<float>(), in.decode_rows,
          in.decode_rows, /*accumulate=*/false);

  kernels::RopeAppendParams rope{};
  rope.qkv = predicted_.as<float>();
  rope.q_norm = w.q_norm.data();
  rope.cos_sin = cos_sin_.as<float>();
  rope.slots = in.slots;
  rope.positions = in.positions;
  rope.cache.head_dim = config_.head_dim;
  rope.rows = in.decode_rows;
  rope.decode_rows = in.decode_rows;
  rope.heads = config_.heads;
  rope.epsilon = config_.rms_norm_eps;
  kernels_.RopeAppend(stream, rope);
  policy.Ahead(stream, layer,
               {predicted_.as<float>(), config_.q_size(), in.slots, in.positions, in.decode_rows,
                config_.heads, AttentionScale()});
}

void DenseModel::Attend(Stream& stream, int layer, const StepInputs& in, RowRange rows,
                        AttentionPolicy& policy) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  kernels::AttentionParams attention{};
  attention.q = qkv_.as<float>() + int64_t{rows.begin} * qkv_size();
  attention.q_stride = qkv_size();
  attention.slots = in.slots + rows.begin;
  attention.positions = in.positions + rows.begin;
  attention.out = Activation(attended_, rows.begin, config_.q_size());
  attention.partial = partial_.as<float>();
  attention.partial_rows = partial_rows_;
  attention.rows = rows.count;
  attention.decode_rows = rows.decode;
  attention.heads = config_.heads;
  attention.scale = AttentionScale();
  attention.out_type = kernels_.activation_type();
  policy.Attend(stream, layer, attention);
  Product(stream, attention.out, w.o, w.o_bias, Residual(rows), rows.count, rows.decode,
          /*accumulate=*/true);
}

void DenseModel::Ffn(Stream& stream, int layer, RowRange rows) {
  const Layer& w = layers_[static_cast<size_t>(layer)];
  const int64_t hidden = config_.hidden_size, inter = config_.intermediate_size;
  void* normed = Activation(normed_, rows.begin, hidden);
  float* gate_up = gate_up_.as<float>() + rows.begin * 2 * inter;
  Norm(stream, Residual(rows), nullptr, w.post_attention_norm, normed, rows.count);
  Product(stream, normed, w.gate_up, w.gate_up_bias, gate_up, rows.count, rows.decode,
          /*accumulate=*/false);

  kernels::SiluMulParams silu{};
  silu.gate_up = gate_up;
  silu.out = Activation(activated_, rows.begin, inter);
  silu.rows = rows.count;
  silu.dim = config_.intermediate_size;
  silu.out_type = kernels_.activation_type();
  kernels_.SiluMul(stream, silu);
  Product(stream, silu.out, w.down, w.down_bias, Residual(rows), rows.count, rows.decode,
          /*accumulate=*/true);
}

void DenseModel::Logits(Stream& stream, const StepInputs& in) {
  if (in.logit_count == 0) return;
  Norm(stream, residual_.as<float>(), in.logit_rows, final_norm_, head_input_.data(),
       in.logit_count);
  // Each makes the choice of a token that generates, the last row of a prompt too.
  Product(stream, head_input_.data(), head_, DeviceVector{}, in.logits, in.logit_count,
          in.logit_count, /*accumulate=*/false);
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
  SLUICE_RETURN_IF_ERROR(model->LoadWeights());
  SLUICE_RETURN_IF_ERROR(model->AllocateWorkspace());
  return model;
}

}  // namespace sluice
