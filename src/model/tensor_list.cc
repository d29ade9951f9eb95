#include "src/model/tensor_list.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

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
  for (int layer = 0; layer < config.layers; ++layer) AppendLayer(config, layer, &out);
  std::sort(out.begin(), out.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  return out;
}

std::string LayerTensor(int layer, const char* suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

const char* HeadTensor(const ModelConfig& config) {
  return config.tie_word_embeddings ? kEmbeddingTensor : kHeadTensor;
}

bool IsIgnorableTensor(const ModelConfig& config, const std::string& name) {
  return (config.tie_word_embeddings && name == kHeadTensor) ||
         absl::EndsWith(name, "rotary_emb.inv_freq");
}

}  // namespace sluice
