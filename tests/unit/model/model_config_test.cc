#include "src/model/model_config.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

using nlohmann::json;

json Fixture(const std::string& name) {
  return json::parse(fixtures::ReadFile(fixtures::SourceDir(name) + "/config.json").value());
}

// Loads a config.json (and a generation_config.json) of these texts.
absl::StatusOr<ModelConfig> LoadText(const std::string& config,
                                     const std::string& generation = "") {
  const fixtures::TempDir dir;
  REQUIRE(fixtures::WriteFile(dir.File("config.json"), config).ok());
  if (!generation.empty()) {
    REQUIRE(fixtures::WriteFile(dir.File("generation_config.json"), generation).ok());
  }
  return LoadModelConfig(dir.path());
}

absl::StatusOr<ModelConfig> Load(const json& config) { return LoadText(config.dump()); }

// The fixture with some keys replaced (null: as it stands in the patch, a JSON null).
absl::StatusOr<ModelConfig> LoadWith(const std::string& fixture, const json& changes) {
  json config = Fixture(fixture);
  for (const auto& [key, value] : changes.items()) config[key] = value;
  return Load(config);
}

absl::StatusOr<ModelConfig> LoadWithout(const std::string& fixture, const std::string& key) {
  json config = Fixture(fixture);
  REQUIRE(config.erase(key) == 1);
  return Load(config);
}

// The load fails, as one sentence with every one of `words`.
void CheckFails(const absl::StatusOr<ModelConfig>& loaded, absl::StatusCode code,
                const std::vector<std::string>& words) {
  REQUIRE_FALSE(loaded.ok());
  const std::string message(loaded.status().message());
  INFO(message);
  CHECK(loaded.status().code() == code);
  CHECK(message.find('\n') == std::string::npos);
  for (const std::string& word : words) {
    INFO("expected in it: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

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
  json config = Fixture("tiny-llama");
  config.erase("head_dim");
  config["num_key_value_heads"] = nullptr;
  const ModelConfig read = Load(config).value();
  CHECK(read.head_dim == 32);
  CHECK(read.kv_heads == 4);
}

TEST_CASE("attention_bias and mlp_bias add biases where the family has them") {
  const ModelConfig llama =
      LoadWith("tiny-llama", {{"attention_bias", true}, {"mlp_bias", true}}).value();
  CHECK(llama.qkv_bias);
  CHECK(llama.o_bias);
  CHECK(llama.mlp_bias);
  const ModelConfig qwen3 = LoadWith("tiny-qwen3", {{"attention_bias", true}}).value();
  CHECK(qwen3.qkv_bias);
  CHECK(qwen3.o_bias);
}

TEST_CASE("old and new spellings of RoPE settings read the same") {
  const json base = [] {
    json c = Fixture("tiny-llama");
    c.erase("rope_parameters");
    return c;
  }();
  const auto read = [&](const json& changes) {
    json config = base;
    config.update(changes);
    const auto out = Load(config);
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
    // Both at once, where they agree.
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
    return LoadWith("tiny-llama", {{"rope_parameters", yarn}}).value().rope;
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
    return LoadWith("tiny-llama", {{"rope_parameters", rope}});
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
  CheckFails(LoadWith("tiny-llama", {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}),
             kInvalid, {"rope_scaling", "rope_parameters"});
  CheckFails(LoadWith("tiny-llama", {{"rope_theta", 10000.0}}), kInvalid, {"rope_theta"});
  CheckFails(LoadWith("tiny-llama", {{"partial_rotary_factor", 0.5}}), kUnsupported,
             {"partial_rotary_factor"});
}

TEST_CASE("EOS ids come from generation_config.json, else from config.json") {
  const std::string config = Fixture("tiny-llama").dump();
  const auto ids = [&](const std::string& generation) {
    return LoadText(config, generation).value().eos_token_ids;
  };
  CHECK(ids("") == std::vector<int32_t>{2});
  CHECK(ids(R"({"eos_token_id": 5})") == std::vector<int32_t>{5});
  CHECK(ids(R"({"eos_token_id": [7, 5, 7], "temperature": 0.1})") == std::vector<int32_t>{5, 7});
  CHECK(ids(R"({"eos_token_id": null})") == std::vector<int32_t>{2});
  CHECK(ids("{}") == std::vector<int32_t>{2});
  CHECK(LoadWithout("tiny-llama", "eos_token_id").value().eos_token_ids.empty());
  CheckFails(LoadText(config, R"({"eos_token_id": 512})"), kInvalid,
             {"generation_config.json", "eos_token_id", "512"});
  CheckFails(LoadText(config, R"({"eos_token_id": "two"})"), kInvalid, {"eos_token_id", "two"});
  CheckFails(LoadText(config, R"({"eos_token_id": [-1]})"), kInvalid, {"eos_token_id", "-1"});
  CheckFails(LoadText(config, "{"), kInvalid, {"generation_config.json", "JSON"});
}

TEST_CASE("a directory without a usable config.json is refused") {
  CheckFails(LoadModelConfig("/nonexistent/model"), absl::StatusCode::kNotFound,
             {"/nonexistent/model/config.json"});
  const fixtures::TempDir empty;
  CheckFails(LoadModelConfig(empty.path()), absl::StatusCode::kNotFound, {"config.json"});
  CheckFails(LoadText("not json"), kInvalid, {"config.json", "JSON"});
  CheckFails(LoadText(""), kInvalid, {"config.json", "JSON"});
  CheckFails(LoadText("[1]"), kInvalid, {"config.json", "JSON object", "array"});
  CheckFails(LoadText(R"({"model_type": "llama", "model_type": "qwen2"})"), kInvalid,
             {"model_type", "twice"});
  std::string deep(5000, '[');
  deep = "{\"a\": " + deep + std::string(5000, ']') + "}";
  CheckFails(LoadText(deep), kInvalid, {"config.json", "nested"});
  CheckFails(LoadText(std::string((4 << 20) + 1, ' ')), kInvalid, {"config.json", "bytes"});
}

TEST_CASE("architectures that are not supported are refused with the list of those that are") {
  CheckFails(LoadWith("tiny-llama", {{"model_type", "mistral"}}), kUnsupported,
             {"model_type", "mistral", "llama, qwen2, qwen3"});
  CheckFails(LoadWithout("tiny-llama", "model_type"), kInvalid, {"model_type", "llama, qwen2"});
  CheckFails(LoadWith("tiny-llama", {{"model_type", 3}}), kInvalid, {"model_type", "string"});
  CheckFails(LoadWith("tiny-llama", {{"architectures", {"LlamaForSequenceClassification"}}}),
             kUnsupported, {"architectures", "LlamaForSequenceClassification", "LlamaForCausalLM"});
  CheckFails(LoadWith("tiny-llama", {{"architectures", "x"}}), kInvalid, {"architectures"});
}

TEST_CASE("options that would change the computation are refused by name") {
  CheckFails(LoadWith("tiny-llama", {{"hidden_act", "gelu"}}), kUnsupported,
             {"hidden_act", "gelu", "silu"});
  CheckFails(LoadWith("tiny-llama", {{"quantization_config", {{"quant_method", "fp8"}}}}),
             kUnsupported, {"quantization_config", "fp8"});
  json sliding = Fixture("tiny-qwen2");
  sliding["use_sliding_window"] = true;
  sliding["sliding_window"] = 1024;
  sliding.erase("layer_types");
  CHECK(Load(sliding).ok());  // max_window_layers is 28: none of the three layers slides
  sliding["max_window_layers"] = 1;
  CheckFails(Load(sliding), kUnsupported, {"sliding_window", "1024"});
  sliding["use_sliding_window"] = false;
  CHECK(Load(sliding).ok());
  CheckFails(LoadWith("tiny-qwen2",
                      {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}}}),
             kUnsupported, {"layer_types", "sliding_attention"});
  CheckFails(LoadWith("tiny-qwen2", {{"layer_types", {"full_attention"}}}), kInvalid,
             {"layer_types", "3"});
}

TEST_CASE("every missing key is named") {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps"}) {
    CheckFails(LoadWithout("tiny-llama", key), kInvalid, {"config.json", key, "found nothing"});
  }
  CheckFails(LoadWithout("tiny-qwen3", "num_key_value_heads"), kInvalid, {"num_key_value_heads"});
  CheckFails(LoadWithout("tiny-qwen3", "head_dim"), kInvalid, {"head_dim"});
}

TEST_CASE("wrong types and impossible sizes name the key, what was expected and what was found") {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const json& bad : {json(0), json(-1), json(1.5), json("128"), json(true), json::array(),
                            json(int64_t{1} << 40), json(UINT64_MAX), json(1e300)}) {
      CheckFails(LoadWith("tiny-llama", {{key, bad}}), kInvalid,
                 {"config.json", key, "expected", "found " + bad.dump()});
    }
  }
  for (const json& bad : {json(0), json(-1e-5), json("1e-5"), json(2)}) {
    CheckFails(LoadWith("tiny-llama", {{"rms_norm_eps", bad}}), kInvalid, {"rms_norm_eps"});
  }
  CheckFails(LoadWith("tiny-llama", {{"tie_word_embeddings", 1}}), kInvalid,
             {"tie_word_embeddings", "true or false", "found 1"});
  CheckFails(LoadWith("tiny-llama", {{"num_key_value_heads", 3}}), kInvalid,
             {"num_key_value_heads", "divisor", "found 3"});
  CheckFails(LoadWith("tiny-llama", {{"num_key_value_heads", 8}}), kInvalid,
             {"num_key_value_heads", "found 8"});
  for (const int bad : {63, 24}) {
    CheckFails(LoadWith("tiny-llama", {{"head_dim", bad}}), kInvalid, {"head_dim", "16", "256"});
  }
  json fallback = Fixture("tiny-llama");
  fallback.erase("head_dim");
  fallback["hidden_size"] = 130;
  CheckFails(Load(fallback), kInvalid, {"hidden_size", "num_attention_heads", "130"});
  fallback["hidden_size"] = 96;  // 24 a head
  CheckFails(Load(fallback), kInvalid, {"hidden_size", "24"});
  // Each within its limit, together past what any node holds.
  CheckFails(LoadWith("tiny-llama", {{"hidden_size", 131072},
                                     {"intermediate_size", 1048576},
                                     {"num_hidden_layers", 1024}}),
             kInvalid, {"parameters"});
}

}  // namespace
}  // namespace sluice
