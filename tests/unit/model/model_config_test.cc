#include "src/model/model_config.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

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
using testing::LoadConfigText;
using testing::LoadConfigWith;
using testing::LoadConfigWithout;

TEST_CASE("the fixtures' configs are read as they are") {
  const ModelConfig llama = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  CHECK(llama.name == "tiny-llama");
  CHECK(llama.architecture == "llama");
  CHECK(llama.hidden_size == 128);
  CHECK(llama.intermediate_size == 256);
  CHECK(llama.layers == 3);
  CHECK(llama.heads == 4);
  CHECK(llama.kv_heads == 2);
  CHECK(llama.head_dim == 64);
  CHECK(llama.vocab_size == 512);
  CHECK(llama.max_position_embeddings == 4096);
  CHECK(llama.rms_norm_eps == 1e-5f);
  CHECK_FALSE(llama.tie_word_embeddings);
  CHECK_FALSE(llama.qkv_bias);
  CHECK_FALSE(llama.qk_norm);
  CHECK(llama.rope == RopeConfig{.kind = RopeKind::kLlama3,
                                 .theta = 500000.0,
                                 .factor = 8.0,
                                 .original_max_position_embeddings = 1024,
                                 .low_freq_factor = 1.0,
                                 .high_freq_factor = 4.0});
  CHECK(llama.eos_token_ids == std::vector<int32_t>{2});

  const ModelConfig qwen2 = LoadModelConfig(fixtures::SourceDir("tiny-qwen2")).value();
  CHECK(qwen2.architecture == "qwen2");
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.o_bias);
  CHECK(qwen2.tie_word_embeddings);
  CHECK(qwen2.kv_heads == 1);

  const ModelConfig qwen3 = LoadModelConfig(fixtures::SourceDir("tiny-qwen3")).value();
  CHECK(qwen3.qk_norm);
  CHECK(qwen3.head_dim == 128);
  CHECK(qwen3.q_size() == 1024);

  const ModelConfig smol = LoadModelConfig(fixtures::SourceDir("smollm2-135m-instruct")).value();
  CHECK(smol.rope == RopeConfig{.theta = 100000.0});
  CHECK(smol.layers == 30);
}

TEST_CASE("head_dim and llama's KV heads have fallbacks") {
  json config = FixtureConfig("tiny-llama");
  config.erase("head_dim");
  config["num_key_value_heads"] = nullptr;
  const ModelConfig read = LoadConfig(config).value();
  CHECK(read.head_dim == 32);
  CHECK(read.kv_heads == 4);
}

TEST_CASE("attention_bias and mlp_bias add biases where the family has them") {
  const ModelConfig llama =
      LoadConfigWith("tiny-llama", {{"attention_bias", true}, {"mlp_bias", true}}).value();
  CHECK(llama.qkv_bias);
  CHECK(llama.o_bias);
  CHECK(llama.mlp_bias);
  const ModelConfig qwen3 = LoadConfigWith("tiny-qwen3", {{"attention_bias", true}}).value();
  CHECK(qwen3.qkv_bias);
  CHECK(qwen3.o_bias);
}

TEST_CASE("old and new spellings of RoPE settings read the same") {
  const json base = [] {
    json c = FixtureConfig("tiny-llama");
    c.erase("rope_parameters");
    return c;
  }();
  const auto read = [&](const json& changes) {
    json config = base;
    config.update(changes);
    const auto out = LoadConfig(config);
    INFO(out.status());
    REQUIRE(out.ok());
    return out->rope;
  };
  const json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 1024}};
  const json linear = {{"factor", 2}};
  const json yarn = {{"factor", 4.0}, {"original_max_position_embeddings", 1024}};
  for (const auto& [kind, settings] : std::vector<std::pair<std::string, json>>{
           {"default", json::object()}, {"linear", linear}, {"llama3", llama3}, {"yarn", yarn}}) {
    INFO(kind);
    json with_rope_type = settings, with_type = settings, new_spelling = settings;
    with_rope_type["rope_type"] = kind;
    with_type["type"] = kind;
    new_spelling["rope_type"] = kind;
    new_spelling["rope_theta"] = 5e5;
    const RopeConfig expected = read({{"rope_parameters", new_spelling}});
    CHECK(RopeKindName(expected.kind) == kind);
    CHECK(expected.theta == 5e5);
    CHECK(read({{"rope_theta", 5e5}, {"rope_scaling", with_rope_type}}) == expected);
    CHECK(read({{"rope_theta", 5e5}, {"rope_scaling", with_type}}) == expected);
    // Both spellings at once are accepted if they agree.
    CHECK(read({{"rope_theta", 5e5},
                {"rope_scaling", with_type},
                {"rope_parameters", new_spelling}}) == expected);
  }
  CHECK(read(json::object()) == RopeConfig{.theta = 10000.0});
  CHECK(read({{"rope_theta", 5e5}, {"rope_scaling", nullptr}}) == RopeConfig{.theta = 5e5});
}

TEST_CASE("yarn's optional settings are read with their fallbacks") {
  json yarn = {{"rope_type", "yarn"}, {"rope_theta", 1e4}, {"factor", 4.0}};
  const auto read = [&] {
    return LoadConfigWith("tiny-llama", {{"rope_parameters", yarn}}).value().rope;
  };
  CHECK(read().original_max_position_embeddings == 4096);  // max_position_embeddings
  CHECK(read().beta_fast == 32);
  CHECK(read().beta_slow == 1);
  CHECK(read().truncate);
  CHECK(read().attention_factor == YarnAttentionFactor(4.0, {}, {}));
  yarn["mscale"] = 0.707;
  yarn["mscale_all_dim"] = 1.0;
  CHECK(read().attention_factor == YarnAttentionFactor(4.0, 0.707, 1.0));
  yarn["attention_factor"] = 1.5;
  CHECK(read().attention_factor == 1.5);
  yarn["beta_fast"] = 16;
  yarn["truncate"] = false;
  yarn["original_max_position_embeddings"] = 1024;
  yarn["factor"] = nullptr;
  CHECK(read().beta_fast == 16);
  CHECK_FALSE(read().truncate);
  CHECK(read().factor == 4.0);
}

TEST_CASE("RoPE settings that are not supported or make no sense are refused by name") {
  const auto with = [](const json& rope) {
    return LoadConfigWith("tiny-llama", {{"rope_parameters", rope}});
  };
  for (const char* kind : {"dynamic", "longrope", "su"}) {
    CheckFails(with({{"rope_type", kind}, {"factor", 2}}), kUnsupported,
               {"rope_parameters", "rope_type", kind, "yarn"});
  }
  CheckFails(with({{"rope_type", "linear"}}), kInvalid, {"factor", "nothing"});
  CheckFails(with({{"rope_type", "linear"}, {"factor", 0}}), kInvalid, {"factor", "found 0"});
  CheckFails(with({{"rope_type", "linear"}, {"factor", "2"}}), kInvalid, {"factor", "\"2\""});
  CheckFails(with({{"rope_type", "yarn"}}), kInvalid, {"factor", "nothing"});
  CheckFails(with({{"rope_type", "llama3"}, {"factor", 8}}), kInvalid, {"low_freq_factor"});
  CheckFails(with({{"rope_type", "llama3"},
                   {"factor", 8},
                   {"low_freq_factor", 4},
                   {"high_freq_factor", 4}}),
             kInvalid, {"high_freq_factor", "low_freq_factor"});
  CheckFails(with({{"rope_theta", -1}}), kInvalid, {"rope_theta", "-1"});
  CheckFails(with({{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}), kUnsupported,
             {"partial_rotary_factor", "0.5"});
  CheckFails(with({{"full_attention", {{"rope_type", "default"}}}}), kUnsupported,
             {"full_attention"});
  CheckFails(with(json::array()), kInvalid, {"rope_parameters", "an object"});
  CheckFails(LoadConfigWith("tiny-llama", {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}),
             kInvalid, {"rope_scaling", "rope_parameters"});
  CheckFails(LoadConfigWith("tiny-llama", {{"rope_theta", 10000.0}}), kInvalid, {"rope_theta"});
  CheckFails(LoadConfigWith("tiny-llama", {{"partial_rotary_factor", 0.5}}), kUnsupported,
             {"partial_rotary_factor"});
}

TEST_CASE("EOS ids come from generation_config.json, else from config.json") {
  const std::string config = FixtureConfig("tiny-llama").dump();
  const auto ids = [&](const std::string& generation) {
    return LoadConfigText(config, generation).value().eos_token_ids;
  };
  CHECK(ids("") == std::vector<int32_t>{2});
  CHECK(ids(R"({"eos_token_id": 5})") == std::vector<int32_t>{5});
  CHECK(ids(R"({"eos_token_id": [7, 5, 7], "temperature": 0.1})") == std::vector<int32_t>{5, 7});
  CHECK(ids(R"({"eos_token_id": null})") == std::vector<int32_t>{2});
  CHECK(ids("{}") == std::vector<int32_t>{2});
  CHECK(LoadConfigWithout("tiny-llama", "eos_token_id").value().eos_token_ids.empty());
  CheckFails(LoadConfigText(config, R"({"eos_token_id": 512})"), kInvalid,
             {"generation_config.json", "eos_token_id", "512"});
  CheckFails(LoadConfigText(config, R"({"eos_token_id": "two"})"), kInvalid,
             {"eos_token_id", "two"});
  CheckFails(LoadConfigText(config, R"({"eos_token_id": [-1]})"), kInvalid, {"eos_token_id", "-1"});
  CheckFails(LoadConfigText(config, "{"), kInvalid, {"generation_config.json", "JSON"});
}

TEST_CASE("a directory without a usable config.json is refused") {
  CheckFails(LoadModelConfig("/nonexistent/model"), absl::StatusCode::kNotFound,
             {"/nonexistent/model/config.json"});
  const fixtures::TempDir empty;
  CheckFails(LoadModelConfig(empty.path()), absl::StatusCode::kNotFound, {"config.json"});
  CheckFails(LoadConfigText("not json"), kInvalid, {"config.json", "JSON"});
  CheckFails(LoadConfigText(""), kInvalid, {"config.json", "JSON"});
  CheckFails(LoadConfigText("[1]"), kInvalid, {"config.json", "JSON object", "array"});
  CheckFails(LoadConfigText(R"({"model_type": "llama", "model_type": "qwen2"})"), kInvalid,
             {"model_type", "twice"});
  std::string deep(5000, '[');
  deep = "{\"a\": " + deep + std::string(5000, ']') + "}";
  CheckFails(LoadConfigText(deep), kInvalid, {"config.json", "nested"});
  CheckFails(LoadConfigText(std::string((4 << 20) + 1, ' ')), kInvalid, {"config.json", "bytes"});
}

TEST_CASE("architectures that are not supported are refused with the list of those that are") {
  CheckFails(LoadConfigWith("tiny-llama", {{"model_type", "mistral"}}), kUnsupported,
             {"model_type", "mistral", "llama, qwen2, qwen3"});
  CheckFails(LoadConfigWithout("tiny-llama", "model_type"), kInvalid,
             {"model_type", "llama, qwen2"});
  CheckFails(LoadConfigWith("tiny-llama", {{"model_type", 3}}), kInvalid, {"model_type", "string"});
  CheckFails(LoadConfigWith("tiny-llama", {{"architectures", {"LlamaForSequenceClassification"}}}),
             kUnsupported, {"architectures", "LlamaForSequenceClassification", "LlamaForCausalLM"});
  CheckFails(LoadConfigWith("tiny-llama", {{"architectures", "x"}}), kInvalid, {"architectures"});
}

TEST_CASE("options that would change the computation are refused by name") {
  CheckFails(LoadConfigWith("tiny-llama", {{"hidden_act", "gelu"}}), kUnsupported,
             {"hidden_act", "gelu", "silu"});
  CheckFails(LoadConfigWith("tiny-llama", {{"quantization_config", {{"quant_method", "fp8"}}}}),
             kUnsupported, {"quantization_config", "fp8"});
  json sliding = FixtureConfig("tiny-qwen2");
  sliding["use_sliding_window"] = true;
  sliding["sliding_window"] = 1024;
  sliding.erase("layer_types");
  CHECK(LoadConfig(sliding).ok());  // max_window_layers is 28: none of the three layers slides
  sliding["max_window_layers"] = 1;
  CheckFails(LoadConfig(sliding), kUnsupported, {"sliding_window", "1024"});
  sliding["use_sliding_window"] = false;
  CHECK(LoadConfig(sliding).ok());
  CheckFails(
      LoadConfigWith("tiny-qwen2",
                     {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}}}),
      kUnsupported, {"layer_types", "sliding_attention"});
  CheckFails(LoadConfigWith("tiny-qwen2", {{"layer_types", {"full_attention"}}}), kInvalid,
             {"layer_types", "3"});
}

TEST_CASE("every missing key is named") {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps"}) {
    CheckFails(LoadConfigWithout("tiny-llama", key), kInvalid,
               {"config.json", key, "found nothing"});
  }
  CheckFails(LoadConfigWithout("tiny-qwen3", "num_key_value_heads"), kInvalid,
             {"num_key_value_heads"});
  CheckFails(LoadConfigWithout("tiny-qwen3", "head_dim"), kInvalid, {"head_dim"});
}

TEST_CASE("wrong types and impossible sizes name the key, what was expected and what was found") {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const json& bad : {json(0), json(-1), json(1.5), json("128"), json(true), json::array(),
                            json(int64_t{1} << 40), json(UINT64_MAX), json(1e300)}) {
      CheckFails(LoadConfigWith("tiny-llama", {{key, bad}}), kInvalid,
                 {"config.json", key, "expected", "found " + bad.dump()});
    }
  }
  for (const json& bad : {json(0), json(-1e-5), json("1e-5"), json(2)}) {
    CheckFails(LoadConfigWith("tiny-llama", {{"rms_norm_eps", bad}}), kInvalid, {"rms_norm_eps"});
  }
  CheckFails(LoadConfigWith("tiny-llama", {{"tie_word_embeddings", 1}}), kInvalid,
             {"tie_word_embeddings", "true or false", "found 1"});
  CheckFails(LoadConfigWith("tiny-llama", {{"num_key_value_heads", 3}}), kInvalid,
             {"num_key_value_heads", "divisor", "found 3"});
  CheckFails(LoadConfigWith("tiny-llama", {{"num_key_value_heads", 8}}), kInvalid,
             {"num_key_value_heads", "found 8"});
  for (const int bad : {63, 24}) {
    CheckFails(LoadConfigWith("tiny-llama", {{"head_dim", bad}}), kInvalid,
               {"head_dim", "16", "256"});
  }
  json fallback = FixtureConfig("tiny-llama");
  fallback.erase("head_dim");
  fallback["hidden_size"] = 130;
  CheckFails(LoadConfig(fallback), kInvalid, {"hidden_size", "num_attention_heads", "130"});
  fallback["hidden_size"] = 96;  // 24 a head
  CheckFails(LoadConfig(fallback), kInvalid, {"hidden_size", "24"});
  // Each size is within its limit, but together they exceed what any node holds.
  CheckFails(LoadConfigWith("tiny-llama", {{"hidden_size", 131072},
                                           {"intermediate_size", 1048576},
                                           {"num_hidden_layers", 1024}}),
             kInvalid, {"parameters"});
}

}  // namespace
}  // namespace sluice
