#include "src/model/tensor_list.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/latent_params.h"

namespace sluice {
namespace {

void AppendLayer(const ModelConfig& c, int layer, std::vector<TensorSpec>* out) {
  const int64_t hidden = c.hidden_size, inner = c.intermediate_size;
  const int64_t q = c.q_size(), kv = c.kv_size();
  const auto matrix = [&](const char* stem, int64_t rows, int64_t cols, bool bias) {
    out->push_back({LayerTensor(layer, stem) + ".weight", {rows, cols}});
    if (bias) out->push_back({LayerTensor(layer, stem) + ".bias", {rows}});
  };
  matrix("self_attn.q_proj", q, hidden, c.qkv_bias);
  matrix("self_attn.k_proj", kv, hidden, c.qkv_bias);
  matrix("self_attn.v_proj", kv, hidden, c.qkv_bias);
  matrix("self_attn.o_proj", hidden, q, c.o_bias);
  matrix("mlp.gate_proj", inner, hidden, c.mlp_bias);
  matrix("mlp.up_proj", inner, hidden, c.mlp_bias);
  matrix("mlp.down_proj", hidden, inner, c.mlp_bias);
  out->push_back({LayerTensor(layer, "input_layernorm.weight"), {hidden}});
  out->push_back({LayerTensor(layer, "post_attention_layernorm.weight"), {hidden}});
  if (c.qk_norm) {
    out->push_back({LayerTensor(layer, "self_attn.q_norm.weight"), {c.head_dim}});
    out->push_back({LayerTensor(layer, "self_attn.k_norm.weight"), {c.head_dim}});
  }
}

// Adds the tensors of a layer of the DeepSeek-V3 family, those of its indexer only if they are
// asked for and the model has one.
void AppendLatentLayer(const ModelConfig& c, int layer, bool indexer,
                       std::vector<TensorSpec>* out) {
  const LatentConfig& l = *c.latent;
  const int64_t hidden = c.hidden_size, heads = c.heads;
  const auto vector = [&](const char* name, int64_t n) {
    out->push_back({LayerTensor(layer, name), {n}});
  };
  const auto matrix = [&](const std::string& stem, int64_t rows, int64_t cols) {
    const std::string name = LayerTensor(layer, stem.c_str()) + ".weight";
    if (l.fp8_weights) {
      out->push_back(
          {ScalesTensor(name),
           {(rows + kScaleBlock - 1) / kScaleBlock, (cols + kScaleBlock - 1) / kScaleBlock},
           TensorForm::kScales});
    }
    out->push_back({name, {rows, cols}, l.fp8_weights ? TensorForm::kFp8 : TensorForm::kFloating});
  };
  const auto ffn = [&](const std::string& stem, int64_t inner) {
    matrix(stem + ".gate_proj", inner, hidden);
    matrix(stem + ".up_proj", inner, hidden);
    matrix(stem + ".down_proj", hidden, inner);
  };
  vector("input_layernorm.weight", hidden);
  vector("post_attention_layernorm.weight", hidden);
  matrix("self_attn.q_a_proj", l.q_rank, hidden);
  vector("self_attn.q_a_layernorm.weight", l.q_rank);
  matrix("self_attn.q_b_proj", heads * l.qk_dim(), l.q_rank);
  matrix("self_attn.kv_a_proj_with_mqa", l.entry_dim(), hidden);
  vector("self_attn.kv_a_layernorm.weight", l.rank);
  matrix("self_attn.kv_b_proj", heads * (l.nope_dim + l.v_dim), l.rank);
  matrix("self_attn.o_proj", hidden, heads * l.v_dim);
  if (indexer && l.indexer.has_value()) {
    matrix("self_attn.indexer.wq_b", int64_t{l.indexer->heads} * kernels::kIndexDim, l.q_rank);
    matrix("self_attn.indexer.wk", kernels::kIndexDim, hidden);
    vector("self_attn.indexer.k_norm.weight", kernels::kIndexDim);
    vector("self_attn.indexer.k_norm.bias", kernels::kIndexDim);
    out->push_back(
        {LayerTensor(layer, "self_attn.indexer.weights_proj.weight"), {l.indexer->heads, hidden}});
  }
  if (layer < l.dense_layers) return ffn("mlp", c.intermediate_size);
  const ExpertConfig& experts = l.experts;
  out->push_back({LayerTensor(layer, "mlp.gate.weight"), {experts.routed, hidden}});
  vector("mlp.gate.e_score_correction_bias", experts.routed);
  for (int e = 0; e < experts.routed; ++e) {
    ffn(absl::StrCat("mlp.experts.", e), experts.intermediate);
  }
  if (experts.shared > 0) ffn("mlp.shared_experts", experts.shared_size());
}

}  // namespace

int64_t TensorSpec::elements() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config) {
  std::vector<TensorSpec> out;
  out.push_back({kEmbeddingTensor, {config.vocab_size, config.hidden_size}});
  out.push_back({kFinalNormTensor, {config.hidden_size}});
  if (!config.tie_word_embeddings) {
    out.push_back({kHeadTensor, {config.vocab_size, config.hidden_size}});
  }
  for (int layer = 0; layer < config.layers; ++layer) {
    config.latent.has_value() ? AppendLatentLayer(config, layer, /*indexer=*/true, &out)
                              : AppendLayer(config, layer, &out);
  }
  std::sort(out.begin(), out.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  return out;
}

std::vector<TensorSpec> DraftTensors(const ModelConfig& config) {
  std::vector<TensorSpec> out;
  if (!HasDraftLayer(config)) return out;
  const int layer = config.layers;
  const int64_t hidden = config.hidden_size, vocab = config.vocab_size;
  AppendLatentLayer(config, layer, /*indexer=*/false, &out);
  // Published checkpoints have no e4m3 here.
  out.push_back({LayerTensor(layer, kDraftTokenNorm), {hidden}});
  out.push_back({LayerTensor(layer, kDraftHiddenNorm), {hidden}});
  out.push_back({LayerTensor(layer, kDraftProjection), {hidden, 2 * hidden}});
  out.push_back({LayerTensor(layer, kDraftHeadNorm), {hidden}});
  out.push_back({LayerTensor(layer, kDraftHead), {vocab, hidden}});
  std::sort(out.begin(), out.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  return out;
}

bool HasDraftLayer(const ModelConfig& config) {
  return config.latent.has_value() && config.latent->next_token_layers > 0;
}

std::string ScalesTensor(const std::string& matrix) { return matrix + "_scale_inv"; }

std::string LayerTensor(int layer, const char* suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

const char* HeadTensor(const ModelConfig& config) {
  return config.tie_word_embeddings ? kEmbeddingTensor : kHeadTensor;
}

bool IsIgnorableTensor(const ModelConfig& config, const std::string& name) {
  if (config.latent.has_value()) {
    for (int i = 0; i < config.latent->next_token_layers; ++i) {
      if (absl::StartsWith(name, LayerTensor(config.layers + i, ""))) return true;
    }
  }
  return (config.tie_word_embeddings && name == kHeadTensor) ||
         absl::EndsWith(name, "rotary_emb.inv_freq");
}

}  // namespace sluice
