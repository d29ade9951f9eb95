#include "src/model/latent_config_reader.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "kernels/latent_params.h"
#include "src/base/status_macros.h"
#include "src/device/weight_rows.h"

namespace sluice {
namespace {

using nlohmann::json;

// Limits on sizes, far above any published model. With those of model_config.cc every product of
// two sizes, in bytes, fits into int64, and every row into int32.
constexpr int64_t kMaxQueryRank = 1 << 14;
constexpr int64_t kMaxHeadDim = 1 << 10;
// Limits of the kernels: entries as published models have them.
constexpr int64_t kMaxRank = kernels::kPackedRank;
constexpr int64_t kMaxRopeDim = kernels::kPackedRope;
constexpr int64_t kMaxHeads = 256;
constexpr int64_t kMaxIndexHeads = 128;
constexpr int64_t kMaxTopK = 2048;
constexpr int64_t kMaxExperts = 512;
constexpr int64_t kMaxExpertsPerToken = 32;
constexpr int64_t kMaxSharedExperts = 16;
constexpr int64_t kMaxIntermediate = 1 << 18;
constexpr int64_t kMaxNextTokenLayers = 16;
// The number of rows in each of the fp8 matrices that are put below one another.
constexpr int64_t kStep = kernels::kFp8BlockRows;

absl::Status ReadInt(const ConfigReader& config, const char* key, int64_t low, int64_t high,
                     int* to) {
  SLUICE_ASSIGN_OR_RETURN(const int64_t value, config.Int(key, low, high));
  *to = static_cast<int>(value);
  return absl::OkStatus();
}

absl::Status ReadSize(const ConfigReader& config, const char* key, int64_t high, int* to) {
  SLUICE_RETURN_IF_ERROR(ReadInt(config, key, 1, high, to));
  if (*to % kStep == 0) return absl::OkStatus();
  return config.Wrong(key, absl::StrCat("a multiple of ", kStep, " up to ", high));
}

// Checks a key that may be left out, and otherwise must be `value`.
absl::Status Only(const ConfigReader& config, const char* key, const json& value) {
  if (!config.Has(key) || config.At(key) == value) return absl::OkStatus();
  return config.Unsupported(key, value.dump());
}

absl::Status CheckOptions(const ConfigReader& config, const LatentFamily& family, int layers,
                          int heads) {
  SLUICE_RETURN_IF_ERROR(Only(config, "attention_bias", false));
  SLUICE_RETURN_IF_ERROR(Only(config, "mlp_bias", false));
  SLUICE_RETURN_IF_ERROR(Only(config, "rope_interleave", true));
  SLUICE_RETURN_IF_ERROR(Only(config, "scoring_func", "sigmoid"));
  SLUICE_RETURN_IF_ERROR(Only(config, "topk_method", "noaux_tc"));
  SLUICE_RETURN_IF_ERROR(Only(config, "moe_layer_freq", 1));
  SLUICE_RETURN_IF_ERROR(Only(config, "ep_size", 1));
  SLUICE_RETURN_IF_ERROR(Only(config, "pretraining_tp", 1));
  if (heads > kMaxHeads) {
    return config.Wrong("num_attention_heads", absl::StrCat("1 to ", kMaxHeads));
  }
  if (config.Has("num_key_value_heads") && config.At("num_key_value_heads") != heads) {
    return config.Wrong(
        "num_key_value_heads",
        absl::StrCat("num_attention_heads (", heads, "), as all heads share the latent entries"));
  }
  if (!config.Has("layer_types")) return absl::OkStatus();
  const json& types = config.At("layer_types");
  if (!types.is_array() || types.size() != static_cast<size_t>(layers)) {
    return config.Wrong("layer_types", absl::StrCat("a list of ", layers, " names"));
  }
  if (std::any_of(types.begin(), types.end(),
                  [&](const json& type) { return type != family.layer_type; })) {
    return config.Unsupported("layer_types", absl::StrCat("\"", family.layer_type, "\""));
  }
  return absl::OkStatus();
}

absl::Status ReadAttention(const ConfigReader& config, const RopeConfig& rope, LatentConfig* out) {
  if (config.IsNull("q_lora_rank")) {
    return config.Unsupported("q_lora_rank", "a rank: queries are made through q_a_proj");
  }
  SLUICE_RETURN_IF_ERROR(ReadSize(config, "q_lora_rank", kMaxQueryRank, &out->q_rank));
  SLUICE_RETURN_IF_ERROR(ReadSize(config, "kv_lora_rank", kMaxRank, &out->rank));
  SLUICE_RETURN_IF_ERROR(ReadSize(config, "qk_nope_head_dim", kMaxHeadDim, &out->nope_dim));
  SLUICE_RETURN_IF_ERROR(ReadSize(config, "qk_rope_head_dim", kMaxRopeDim, &out->rope_dim));
  SLUICE_RETURN_IF_ERROR(ReadSize(config, "v_head_dim", kMaxHeadDim, &out->v_dim));
  if (config.Has("qk_head_dim") && config.At("qk_head_dim") != out->qk_dim()) {
    return config.Wrong("qk_head_dim", absl::StrCat("qk_nope_head_dim + qk_rope_head_dim (",
                                                    out->qk_dim(), "), or nothing"));
  }
  const double mscale = YarnSoftmaxFactor(rope);
  out->softmax_scale =
      static_cast<float>(mscale * mscale / std::sqrt(static_cast<double>(out->qk_dim())));
  return absl::OkStatus();
}

absl::StatusOr<IndexerConfig> ReadIndexer(const ConfigReader& config) {
  IndexerConfig out;
  SLUICE_ASSIGN_OR_RETURN(const int64_t dim, config.Int("index_head_dim", 1, 1 << 16));
  if (dim != kernels::kIndexDim) {
    return config.Unsupported("index_head_dim", absl::StrCat(kernels::kIndexDim));
  }
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "index_n_heads", 1, kMaxIndexHeads, &out.heads));
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "index_topk", 1, kMaxTopK, &out.top_k));
  return out;
}

absl::Status ReadExperts(const ConfigReader& config, ExpertConfig* out) {
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "n_routed_experts", 1, kMaxExperts, &out->routed));
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "n_shared_experts", 0, kMaxSharedExperts, &out->shared));
  SLUICE_RETURN_IF_ERROR(
      ReadSize(config, "moe_intermediate_size", kMaxIntermediate, &out->intermediate));
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "n_group", 1, kMaxExperts, &out->groups));
  if (out->routed % out->groups != 0) {
    return config.Wrong("n_group",
                        absl::StrCat("a divisor of n_routed_experts (", out->routed, ")"));
  }
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "topk_group", 1, out->groups, &out->top_groups));
  const int64_t open = int64_t{out->routed} / out->groups * out->top_groups;
  SLUICE_RETURN_IF_ERROR(ReadInt(config, "num_experts_per_tok", 1,
                                 std::min(kMaxExpertsPerToken, open), &out->per_token));
  SLUICE_ASSIGN_OR_RETURN(out->normalise, config.BoolOr("norm_topk_prob", true));
  SLUICE_ASSIGN_OR_RETURN(const double scaling, config.Number("routed_scaling_factor", 1e-6, 1e6));
  out->scaling = static_cast<float>(scaling);
  return absl::OkStatus();
}

// Reads first_k_dense_replace, or the same from a list of the layers' types.
absl::StatusOr<int> ReadDenseLayers(const ConfigReader& config, int layers) {
  if (!config.Has("mlp_layer_types")) {
    SLUICE_ASSIGN_OR_RETURN(const int64_t count, config.Int("first_k_dense_replace", 0, 1 << 16));
    return static_cast<int>(std::min<int64_t>(count, layers));
  }
  const json& types = config.At("mlp_layer_types");
  const std::string expected =
      absl::StrCat("a list of ", layers, " names, \"dense\" ones and then \"sparse\" ones");
  if (!types.is_array() || types.size() != static_cast<size_t>(layers)) {
    return config.Wrong("mlp_layer_types", expected);
  }
  const auto sparse = std::find(types.begin(), types.end(), "sparse");
  if (std::any_of(types.begin(), sparse, [](const json& t) { return t != "dense"; }) ||
      std::any_of(sparse, types.end(), [](const json& t) { return t != "sparse"; })) {
    return config.Unsupported("mlp_layer_types", expected);
  }
  const auto count = static_cast<int>(sparse - types.begin());
  SLUICE_ASSIGN_OR_RETURN(const int64_t also,
                          config.IntOr("first_k_dense_replace", 0, 1 << 16, count));
  if (std::min<int64_t>(also, layers) != count) {
    return config.Wrong("first_k_dense_replace",
                        absl::StrCat("the dense layers of mlp_layer_types (", count, ")"));
  }
  return count;
}

absl::StatusOr<bool> ReadQuantization(const ConfigReader& config) {
  if (!config.Has("quantization_config")) return false;
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader settings, config.Object("quantization_config"));
  const auto needed = [&](const char* key, const json& value) -> absl::Status {
    if (!settings.Has(key)) return settings.Wrong(key, value.dump());
    return Only(settings, key, value);
  };
  SLUICE_RETURN_IF_ERROR(needed("quant_method", "fp8"));
  SLUICE_RETURN_IF_ERROR(Only(settings, "fmt", "e4m3"));
  SLUICE_RETURN_IF_ERROR(needed("weight_block_size", json::array({kScaleBlock, kScaleBlock})));
  // This key is about activations, which are not quantised here.
  SLUICE_RETURN_IF_ERROR(Only(settings, "activation_scheme", "dynamic"));
  for (const char* key : {"modules_to_not_convert", "ignored_layers"}) {
    SLUICE_RETURN_IF_ERROR(Only(settings, key, json::array()));
  }
  return true;
}

}  // namespace

absl::StatusOr<LatentConfig> ReadLatentConfig(const ConfigReader& config,
                                              const LatentFamily& family, const RopeConfig& rope,
                                              int layers, int heads) {
  LatentConfig out;
  for (const char* key : {"hidden_size", "intermediate_size"}) {
    int unused = 0;
    SLUICE_RETURN_IF_ERROR(ReadSize(config, key, 1 << 20, &unused));
  }
  SLUICE_RETURN_IF_ERROR(CheckOptions(config, family, layers, heads));
  SLUICE_RETURN_IF_ERROR(ReadAttention(config, rope, &out));
  if (family.has_indexer) {
    SLUICE_ASSIGN_OR_RETURN(out.indexer, ReadIndexer(config));
  }
  SLUICE_RETURN_IF_ERROR(ReadExperts(config, &out.experts));
  SLUICE_ASSIGN_OR_RETURN(out.dense_layers, ReadDenseLayers(config, layers));
  SLUICE_ASSIGN_OR_RETURN(const int64_t more,
                          config.IntOr("num_nextn_predict_layers", 0, kMaxNextTokenLayers, 0));
  out.next_token_layers = static_cast<int>(more);
  SLUICE_ASSIGN_OR_RETURN(out.fp8_weights, ReadQuantization(config));
  return out;
}

}  // namespace sluice
