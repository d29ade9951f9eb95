#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/model/latent_caches.h"
#include "src/model/model.h"
#include "tests/fixtures/fixtures.h"
#include "tests/unit/model/config_support.h"

namespace sluice {
namespace {

using nlohmann::json;
using testing::CheckFails;
using testing::FixtureConfig;
using testing::kInvalid;
using testing::kUnsupported;
using testing::LoadConfig;
using testing::LoadConfigWith;
using testing::LoadConfigWithout;

constexpr char kTiny[] = "tiny-deepseek-v32";

// Returns the config that DeepSeek-V3.2-Exp publishes.
json Published() {
  return json::parse(R"({
    "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": false, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v32", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 129280})");
}

TEST_CASE("the configs of latent fixtures are read as they are") {
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir(kTiny)).value();
  CHECK(config.architecture == "deepseek_v32");
  CHECK(config.hidden_size == 192);
  CHECK(config.heads == 4);
  CHECK(config.head_dim == 128);
  CHECK(config.rope.kind == RopeKind::kYarn);
  CHECK(config.rope.attention_factor == 1.0);
  CHECK(config.rope.mscale_all_dim == 1.0);
  REQUIRE(config.latent.has_value());
  const LatentConfig& latent = *config.latent;
  CHECK(latent.q_rank == 96);
  CHECK(latent.rank == 512);
  CHECK(latent.nope_dim == 64);
  CHECK(latent.rope_dim == 64);
  CHECK(latent.v_dim == 64);
  const double mscale = 0.1 * std::log(4.0) + 1.0;
  CHECK(latent.softmax_scale == Approx(mscale * mscale / std::sqrt(128.0)));
  REQUIRE(latent.indexer.has_value());
  CHECK(latent.indexer->heads == 8);
  CHECK(latent.indexer->top_k == 64);
  CHECK(latent.experts.routed == 8);
  CHECK(latent.experts.shared == 1);
  CHECK(latent.experts.per_token == 2);
  CHECK(latent.experts.groups == 4);
  CHECK(latent.experts.top_groups == 2);
  CHECK(latent.experts.intermediate == 64);
  CHECK(latent.experts.normalise);
  CHECK(latent.experts.scaling == 2.5f);
  CHECK(latent.dense_layers == 1);
  CHECK_FALSE(latent.fp8_weights);
  CHECK(LoadModelConfig(fixtures::SourceDir("tiny-deepseek-v32-fp8")).value().latent->fp8_weights);
  CHECK_FALSE(LoadModelConfig(fixtures::SourceDir("tiny-llama")).value().latent.has_value());
}

TEST_CASE("a published config is read, with the old spelling of RoPE") {
  const ModelConfig config = LoadConfig(Published()).value();
  CHECK(config.layers == 61);
  CHECK(config.latent->dense_layers == 3);
  CHECK(config.latent->next_token_layers == 1);
  CHECK(config.latent->fp8_weights);
  CHECK(config.latent->indexer->top_k == 2048);
  const double mscale = 0.1 * std::log(40.0) + 1.0;
  CHECK(config.latent->softmax_scale == Approx(mscale * mscale / std::sqrt(192.0)));
  // The new spelling gives the same.
  json changed = Published();
  changed["rope_parameters"] = changed["rope_scaling"];
  changed["rope_parameters"]["rope_theta"] = 10000;
  changed.erase("rope_scaling");
  CHECK(LoadConfig(changed).value().rope == config.rope);
}

TEST_CASE("the softmax scale has no mscale without yarn, or without mscale_all_dim") {
  json config = FixtureConfig(kTiny);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e4}};
  CHECK(LoadConfig(config).value().latent->softmax_scale == Approx(1 / std::sqrt(128.0)));
  config = FixtureConfig(kTiny);
  config["rope_parameters"].erase("mscale_all_dim");
  CHECK(LoadConfig(config).value().latent->softmax_scale == Approx(1 / std::sqrt(128.0)));
}

TEST_CASE("DeepSeek-V3 has no indexer") {
  json config = Published();
  config["model_type"] = "deepseek_v3";
  config["architectures"] = {"DeepseekV3ForCausalLM"};
  for (const char* key : {"index_head_dim", "index_n_heads", "index_topk"}) config.erase(key);
  const ModelConfig read = LoadConfig(config).value();
  CHECK_FALSE(read.latent->indexer.has_value());
  const CacheLayout layout = CacheLayoutOf(read, DType::kFloat8E4M3, 64).value();
  REQUIRE(layout.kinds.size() == 1);
  CHECK(layout.kinds[0].name == "latent");
}

TEST_CASE("dense layers come from either spelling") {
  json config = FixtureConfig(kTiny);
  config.erase("mlp_layer_types");
  CHECK(LoadConfig(config).value().latent->dense_layers == 1);
  config["first_k_dense_replace"] = 7;  // more than there are
  CHECK(LoadConfig(config).value().latent->dense_layers == 3);
  config = FixtureConfig(kTiny);
  config.erase("first_k_dense_replace");
  config["mlp_layer_types"] = {"dense", "dense", "sparse"};
  CHECK(LoadConfig(config).value().latent->dense_layers == 2);
  config["mlp_layer_types"] = {"sparse", "sparse", "sparse"};
  CHECK(LoadConfig(config).value().latent->dense_layers == 0);
}

TEST_CASE("options of the latent family that would change the computation are refused by name") {
  const std::vector<std::pair<json, std::vector<std::string>>> cases = {
      {{{"q_lora_rank", nullptr}}, {"q_lora_rank", "null", "a rank"}},
      {{{"index_head_dim", 64}}, {"index_head_dim", "64", "128"}},
      {{{"attention_bias", true}}, {"attention_bias", "true", "false"}},
      {{{"mlp_bias", true}}, {"mlp_bias", "false"}},
      {{{"rope_interleave", false}}, {"rope_interleave", "true"}},
      {{{"scoring_func", "softmax"}}, {"scoring_func", "softmax", "sigmoid"}},
      {{{"topk_method", "greedy"}}, {"topk_method", "greedy", "noaux_tc"}},
      {{{"moe_layer_freq", 2}}, {"moe_layer_freq", "2"}},
      {{{"ep_size", 8}}, {"ep_size", "8"}},
      {{{"hidden_act", "gelu"}}, {"hidden_act", "gelu"}},
      {{{"layer_types", {"full_attention", "indexed_attention", "indexed_attention"}}},
       {"layer_types", "indexed_attention"}},
      {{{"mlp_layer_types", {"sparse", "dense", "sparse"}}}, {"mlp_layer_types", "dense"}},
      {{{"mlp_layer_types", {"dense", "sparse", "linear"}}}, {"mlp_layer_types", "linear"}},
  };
  for (const auto& [changes, words] : cases) {
    CheckFails(LoadConfigWith(kTiny, changes), kUnsupported, words);
  }
}

TEST_CASE("quantised weights of other forms are refused by name") {
  const auto with = [](const char* key, const json& value) {
    json config = FixtureConfig("tiny-deepseek-v32-fp8");
    config["quantization_config"][key] = value;
    return LoadConfig(config);
  };
  const std::string where = "quantization_config";
  CheckFails(with("quant_method", "awq"), kUnsupported, {where, "quant_method", "awq", "fp8"});
  CheckFails(with("quant_method", nullptr), kInvalid, {where, "quant_method", "fp8"});
  CheckFails(with("fmt", "e5m2"), kUnsupported, {where, "fmt", "e5m2", "e4m3"});
  CheckFails(with("weight_block_size", {64, 128}), kUnsupported,
             {where, "weight_block_size", "[64,128]", "[128,128]"});
  CheckFails(with("weight_block_size", nullptr), kInvalid, {where, "weight_block_size"});
  CheckFails(with("activation_scheme", "static"), kUnsupported, {where, "activation_scheme"});
  CheckFails(with("modules_to_not_convert", {"lm_head"}), kUnsupported,
             {where, "modules_to_not_convert", "lm_head"});
  CheckFails(LoadConfigWith(kTiny, {{"quantization_config", "fp8"}}), kInvalid,
             {where, "an object"});
}

TEST_CASE("every key of the latent family that is missing is named") {
  for (const char* key :
       {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "index_head_dim", "index_n_heads", "index_topk", "n_routed_experts", "n_shared_experts",
        "moe_intermediate_size", "n_group", "topk_group", "num_experts_per_tok",
        "routed_scaling_factor"}) {
    CheckFails(LoadConfigWithout(kTiny, key), kInvalid, {"config.json", key, "found nothing"});
  }
  json config = FixtureConfig(kTiny);
  config.erase("mlp_layer_types");
  config.erase("first_k_dense_replace");
  CheckFails(LoadConfig(config), kInvalid, {"first_k_dense_replace", "found nothing"});
}

TEST_CASE("impossible sizes of the latent family name the key and what was expected") {
  for (const char* key :
       {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "index_head_dim", "index_n_heads", "index_topk", "n_routed_experts",
        "moe_intermediate_size", "n_group", "topk_group", "num_experts_per_tok"}) {
    for (const json& bad : {json(0), json(-16), json(1.5), json("64"), json(int64_t{1} << 40)}) {
      CheckFails(LoadConfigWith(kTiny, {{key, bad}}), kInvalid,
                 {"config.json", key, "expected", "found " + bad.dump()});
    }
  }
  const std::vector<std::pair<json, std::vector<std::string>>> cases = {
      {{{"q_lora_rank", 100}}, {"q_lora_rank", "multiple of 32", "100"}},
      {{{"v_head_dim", 40}}, {"v_head_dim", "multiple of 32", "40"}},
      {{{"hidden_size", 200}}, {"hidden_size", "multiple of 32", "200"}},
      {{{"intermediate_size", 400}}, {"intermediate_size", "multiple of 32", "400"}},
      {{{"num_experts_per_tok", 33}, {"n_routed_experts", 256}},
       {"num_experts_per_tok", "32", "33"}},
      {{{"qk_rope_head_dim", 96}}, {"qk_rope_head_dim", "64", "96"}},
      {{{"kv_lora_rank", 1024}}, {"kv_lora_rank", "512", "1024"}},
      {{{"qk_head_dim", 64}}, {"qk_head_dim", "128", "64"}},
      {{{"num_key_value_heads", 2}}, {"num_key_value_heads", "4", "2"}},
      {{{"index_topk", 4096}}, {"index_topk", "2048", "4096"}},
      {{{"index_n_heads", 129}}, {"index_n_heads", "128", "129"}},
      {{{"n_routed_experts", 520}}, {"n_routed_experts", "512", "520"}},
      {{{"num_attention_heads", 257}, {"num_key_value_heads", 257}},
       {"num_attention_heads", "256", "257"}},
      {{{"n_group", 3}}, {"n_group", "divisor", "3"}},
      {{{"topk_group", 5}}, {"topk_group", "4", "5"}},
      {{{"num_experts_per_tok", 5}}, {"num_experts_per_tok", "4", "5"}},
      {{{"first_k_dense_replace", 2}}, {"first_k_dense_replace", "mlp_layer_types", "2"}},
      {{{"layer_types", {"indexed_attention"}}}, {"layer_types", "3"}},
      {{{"mlp_layer_types", {"dense"}}}, {"mlp_layer_types", "3"}},
      {{{"num_nextn_predict_layers", -1}}, {"num_nextn_predict_layers", "-1"}},
      {{{"norm_topk_prob", 1}}, {"norm_topk_prob", "true or false"}},
      {{{"routed_scaling_factor", 0}}, {"routed_scaling_factor", "0"}},
      {{{"n_routed_experts", 512},
        {"moe_intermediate_size", 262144},
        {"hidden_size", 131072},
        {"num_hidden_layers", 3}},
       {"parameters"}},
  };
  for (const auto& [changes, words] : cases) {
    CheckFails(LoadConfigWith(kTiny, changes), kInvalid, words);
  }
}

TEST_CASE("latent caches have the published forms") {
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir(kTiny)).value();
  const CacheLayout packed = CacheLayoutOf(config, DType::kFloat8E4M3, 64).value();
  CHECK(packed.layers == 3);
  REQUIRE(packed.kinds.size() == 2);
  CHECK(packed.kinds[0].name == "latent");
  CHECK(packed.kinds[0].heads == 1);
  CHECK(packed.kinds[0].part_bytes == std::vector<int64_t>{656});
  CHECK(packed.kinds[1].name == "index");
  CHECK(packed.kinds[1].part_bytes == std::vector<int64_t>{128, 4});
  CHECK(packed.kinds[1].bytes_per_token == 132);
  const CacheLayout bf16 = CacheLayoutOf(config, DType::kBFloat16, 64).value();
  CHECK(bf16.kinds[0].bytes_per_token == 1152);
  CHECK(bf16.kinds[1].part_bytes == std::vector<int64_t>{256});
  const CacheLayout exact = CacheLayoutOf(config, DType::kFloat32, 64).value();
  CHECK(exact.kinds[0].bytes_per_token == 2304);
  CHECK(exact.kinds[1].part_bytes == std::vector<int64_t>{512});
}

TEST_CASE("fp8 caches are refused where there is no such form") {
  const auto refused = [](const ModelConfig& config, const std::vector<std::string>& words) {
    const absl::Status status = CacheLayoutOf(config, DType::kFloat8E4M3, 64).status();
    CHECK(status.code() == kInvalid);
    for (const std::string& word : words) {
      CHECK(std::string(status.message()).find(word) != std::string::npos);
    }
  };
  refused(LoadModelConfig(fixtures::SourceDir("tiny-llama")).value(), {"kv_dtype", "bf16"});
  refused(LoadConfigWith(kTiny, {{"kv_lora_rank", 256}}).value(), {"kv_dtype", "512", "256"});
}

}  // namespace
}  // namespace sluice
