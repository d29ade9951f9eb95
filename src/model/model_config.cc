#include "src/model/model_config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_join.h"
#include "kernels/params.h"
#include "src/base/config_reader.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"
#include "src/model/latent_config_reader.h"
#include "src/model/rope_config.h"
#include "src/sampling/sampling_params.h"

namespace sluice {
namespace {

using nlohmann::json;

// Properties of a family that its config does not say.
struct Family {
  const char* name;        // model_type
  const char* class_name;  // in `architectures`
  bool always_qkv_bias;    // Qwen2; other families go by attention_bias
  bool reads_attention_bias;
  bool reads_mlp_bias;
  bool qk_norm;
  bool needs_kv_heads;  // no fallback: the family's own is one published model's number
  bool needs_head_dim;
  const LatentFamily* latent;  // set for the DeepSeek-V3 family
};
constexpr LatentFamily kDeepseekV3{false, "full_attention"};
constexpr LatentFamily kDeepseekV32{true, "indexed_attention"};
constexpr Family kFamilies[] = {
    {"llama", "LlamaForCausalLM", false, true, true, false, false, false, nullptr},
    {"qwen2", "Qwen2ForCausalLM", true, false, false, false, true, false, nullptr},
    {"qwen3", "Qwen3ForCausalLM", false, true, false, true, true, true, nullptr},
    {"deepseek_v3", "DeepseekV3ForCausalLM", false, false, false, false, false, false,
     &kDeepseekV3},
    {"deepseek_v32", "DeepseekV32ForCausalLM", false, false, false, false, false, false,
     &kDeepseekV32},
};

// Limits on sizes. The largest tensor is then 2^17 x 2^22 elements = 1 TiB of bf16, and
// heads * head_dim + 2 * kv_heads * head_dim is at most 3 * 2^18. So every product of two sizes, in
// bytes, stays far inside int64, and every row inside int32.
constexpr int64_t kMaxHidden = 1 << 17;
constexpr int64_t kMaxIntermediate = 1 << 20;
constexpr int64_t kMaxLayers = 1 << 10;
constexpr int64_t kMaxHeads = 1 << 10;
constexpr int64_t kMaxVocabulary = 1 << 22;
constexpr int64_t kMaxPositions = 1 << 28;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 16;
// 2^40 parameters are 2 TiB of bf16: no node holds them.
constexpr int64_t kMaxParameters = int64_t{1} << 40;

absl::StatusOr<const Family*> FindFamily(const ConfigReader& config) {
  SLUICE_ASSIGN_OR_RETURN(const std::string type, config.StringOr("model_type", ""));
  if (type.empty()) return config.Wrong("model_type", SupportedArchitectures());
  const Family* family = nullptr;
  for (const Family& f : kFamilies) {
    if (type == f.name) family = &f;
  }
  if (family == nullptr) return config.Unsupported("model_type", SupportedArchitectures());
  if (!config.Has("architectures")) return family;
  const json& classes = config.At("architectures");
  if (!classes.is_array()) return config.Wrong("architectures", "a list of class names");
  for (const json& name : classes) {
    if (name == family->class_name) return family;
  }
  return config.Unsupported("architectures", family->class_name);
}

absl::Status CheckActivation(const ConfigReader& config) {
  SLUICE_ASSIGN_OR_RETURN(const std::string activation, config.StringOr("hidden_act", "silu"));
  if (activation != "silu") return config.Unsupported("hidden_act", "\"silu\"");
  return absl::OkStatus();
}

// Refuses options that would change the computation of dense layers with KV heads.
absl::Status CheckDenseOptions(const ConfigReader& config, int layers) {
  if (config.Has("quantization_config")) {
    return config.Unsupported("quantization_config", "BF16, F16 and F32 weights");
  }
  if (config.Has("layer_types")) {
    const json& types = config.At("layer_types");
    if (!types.is_array() || types.size() != static_cast<size_t>(layers)) {
      return config.Wrong("layer_types", absl::StrCat("a list of ", layers, " names"));
    }
    if (std::any_of(types.begin(), types.end(),
                    [](const json& t) { return t != "full_attention"; })) {
      return config.Unsupported("layer_types", "\"full_attention\"");
    }
  } else if (config.Has("sliding_window")) {
    // Layers from max_window_layers on use a sliding window, unless use_sliding_window says that
    // none does.
    SLUICE_ASSIGN_OR_RETURN(const bool used, config.BoolOr("use_sliding_window", true));
    SLUICE_ASSIGN_OR_RETURN(const int64_t full_layers,
                            config.IntOr("max_window_layers", 0, kMaxLayers, 0));
    if (used && full_layers < layers) {
      return config.Unsupported("sliding_window", "null, or use_sliding_window false");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSize(const ConfigReader& config, const char* key, int64_t high, int* to) {
  SLUICE_ASSIGN_OR_RETURN(const int64_t value, config.Int(key, 1, high));
  *to = static_cast<int>(value);
  return absl::OkStatus();
}

absl::Status ReadSizes(const ConfigReader& config, ModelConfig* out) {
  const auto read = [&](const char* key, int64_t high, int* to) {
    return ReadSize(config, key, high, to);
  };
  SLUICE_RETURN_IF_ERROR(read("hidden_size", kMaxHidden, &out->hidden_size));
  SLUICE_RETURN_IF_ERROR(read("intermediate_size", kMaxIntermediate, &out->intermediate_size));
  SLUICE_RETURN_IF_ERROR(read("num_hidden_layers", kMaxLayers, &out->layers));
  SLUICE_RETURN_IF_ERROR(read("num_attention_heads", kMaxHeads, &out->heads));
  SLUICE_RETURN_IF_ERROR(read("vocab_size", kMaxVocabulary, &out->vocab_size));
  return read("max_position_embeddings", kMaxPositions, &out->max_position_embeddings);
}

absl::Status ReadHeads(const ConfigReader& config, const Family& family, ModelConfig* out) {
  out->kv_heads = out->heads;
  if (family.needs_kv_heads || config.Has("num_key_value_heads")) {
    SLUICE_RETURN_IF_ERROR(ReadSize(config, "num_key_value_heads", kMaxHeads, &out->kv_heads));
  }
  if (out->heads % out->kv_heads != 0) {
    return config.Wrong("num_key_value_heads",
                        absl::StrCat("a divisor of num_attention_heads (", out->heads, ")"));
  }
  if (family.needs_head_dim || config.Has("head_dim")) {
    SLUICE_RETURN_IF_ERROR(ReadSize(config, "head_dim", kMaxHeadDim, &out->head_dim));
  } else if (out->hidden_size % out->heads != 0) {
    return config.Wrong("hidden_size", absl::StrCat("a multiple of num_attention_heads (",
                                                    out->heads, ") where there is no head_dim"));
  } else {
    out->head_dim = out->hidden_size / out->heads;
  }
  if (out->head_dim % kHeadDimStep != 0 || out->head_dim > kMaxHeadDim) {
    const std::string expected =
        absl::StrCat("a multiple of ", kHeadDimStep, " up to ", kMaxHeadDim);
    if (config.Has("head_dim")) return config.Wrong("head_dim", expected);
    return config.Wrong(
        "hidden_size",
        absl::StrCat("hidden_size / num_attention_heads = ", out->head_dim, " to be ", expected));
  }
  return absl::OkStatus();
}

// Returns about the number of elements in a layer's matrices.
int64_t LayerParameters(const ModelConfig& c) {
  const int64_t hidden = c.hidden_size;
  if (!c.latent.has_value()) {
    return hidden * (2 * c.q_size() + 2 * c.kv_size() + 3 * int64_t{c.intermediate_size});
  }
  const LatentConfig& l = *c.latent;
  const int64_t experts = int64_t{l.experts.routed} + l.experts.shared;
  return hidden * (l.q_rank + l.entry_dim() + int64_t{c.heads} * l.v_dim) +
         int64_t{c.heads} * (int64_t{l.qk_dim()} * l.q_rank + (l.nope_dim + l.v_dim) * l.rank) +
         3 * hidden *
             (l.dense_layers < c.layers ? experts * l.experts.intermediate
                                        : int64_t{c.intermediate_size});
}

absl::Status CheckParameters(const ConfigReader& config, const ModelConfig& c) {
  const int64_t parameters =
      LayerParameters(c) * c.layers + 2 * int64_t{c.hidden_size} * c.vocab_size;
  if (parameters > kMaxParameters) {
    return config.Wrong("num_hidden_layers",
                        absl::StrCat("sizes that make at most ", kMaxParameters, " parameters (",
                                     parameters, " as they are)"));
  }
  return absl::OkStatus();
}

// Reads the EOS ids under `eos_token_id`: an integer, a list of integers, or nothing.
absl::Status ReadEosIds(const ConfigReader& config, int vocab_size, std::vector<int32_t>* out) {
  if (!config.Has("eos_token_id")) return absl::OkStatus();
  const json& value = config.At("eos_token_id");
  const json list = value.is_array() ? value : json::array({value});
  const std::string expected = absl::StrCat("a token id below vocab_size (", vocab_size,
                                            "), or up to ", kMaxEosIds, " of them");
  if (list.size() > kMaxEosIds) return config.Wrong("eos_token_id", expected);
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab_size)) {
      return config.Wrong("eos_token_id", expected);
    }
    out->push_back(id.get<int32_t>());
  }
  std::sort(out->begin(), out->end());
  out->erase(std::unique(out->begin(), out->end()), out->end());
  return absl::OkStatus();
}

absl::Status ReadAllEosIds(const std::string& dir, const ConfigReader& config, ModelConfig* out) {
  const std::string path = dir + "/generation_config.json";
  const absl::StatusOr<json> generation = ReadJsonFile(path, kMaxConfigBytes);
  if (generation.ok()) {
    const ConfigReader reader(path, *generation);
    if (reader.Has("eos_token_id")) {
      return ReadEosIds(reader, out->vocab_size, &out->eos_token_ids);
    }
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  return ReadEosIds(config, out->vocab_size, &out->eos_token_ids);
}

std::string LastComponent(const std::string& dir) {
  std::error_code ignored;
  const auto full = std::filesystem::weakly_canonical(dir, ignored);
  return full.filename().empty() ? dir : full.filename().string();
}

}  // namespace

std::string SupportedArchitectures() {
  return absl::StrJoin(kFamilies, ", ",
                       [](std::string* out, const Family& f) { out->append(f.name); });
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string path = dir + "/config.json";
  absl::StatusOr<json> parsed = ReadJsonFile(path, kMaxConfigBytes);
  if (absl::IsNotFound(parsed.status())) {
    return absl::NotFoundError(absl::StrCat(
        path, ": no such file: expected the directory of a Hugging Face model, with config.json"));
  }
  SLUICE_RETURN_IF_ERROR(parsed.status());
  const ConfigReader config(path, *parsed);

  ModelConfig out;
  out.name = LastComponent(dir);
  SLUICE_ASSIGN_OR_RETURN(const Family* family, FindFamily(config));
  out.architecture = family->name;
  SLUICE_RETURN_IF_ERROR(ReadSizes(config, &out));
  SLUICE_RETURN_IF_ERROR(CheckActivation(config));
  SLUICE_ASSIGN_OR_RETURN(out.rope, ReadRopeConfig(config, out.max_position_embeddings));
  if (family->latent != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(
        out.latent, ReadLatentConfig(config, *family->latent, out.rope, out.layers, out.heads));
    out.kv_heads = out.heads;
    out.head_dim = out.latent->qk_dim();
  } else {
    SLUICE_RETURN_IF_ERROR(ReadHeads(config, *family, &out));
    SLUICE_RETURN_IF_ERROR(CheckDenseOptions(config, out.layers));
  }
  SLUICE_RETURN_IF_ERROR(CheckParameters(config, out));
  SLUICE_ASSIGN_OR_RETURN(const double epsilon, config.Number("rms_norm_eps", 1e-12, 1e-1));
  out.rms_norm_eps = static_cast<float>(epsilon);
  SLUICE_ASSIGN_OR_RETURN(out.tie_word_embeddings, config.BoolOr("tie_word_embeddings", false));
  SLUICE_ASSIGN_OR_RETURN(const bool attention_bias, config.BoolOr("attention_bias", false));
  SLUICE_ASSIGN_OR_RETURN(const bool mlp_bias, config.BoolOr("mlp_bias", false));
  out.o_bias = family->reads_attention_bias && attention_bias;
  out.qkv_bias = family->always_qkv_bias || out.o_bias;
  out.mlp_bias = family->reads_mlp_bias && mlp_bias;
  out.qk_norm = family->qk_norm;
  SLUICE_RETURN_IF_ERROR(ReadAllEosIds(dir, config, &out));
  return out;
}

}  // namespace sluice
