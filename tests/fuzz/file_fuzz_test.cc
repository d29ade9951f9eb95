// Damages files of a model directory and of a configuration. Every file must be read, or refused in
// one short line, and none may take more memory than a multiple of its size.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/config/config_file.h"
#include "src/model/checkpoint.h"
#include "src/model/model_config.h"
#include "src/model/safetensors.h"
#include "src/model/token_bytes.h"
#include "tests/fixtures/fixtures.h"
#include "tests/fuzz/allocation_meter.h"
#include "tests/fuzz/mutator.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using fixtures::ReadFile;
using fixtures::TempDir;
using fixtures::WriteFile;
using fuzz::AllocationMeter;
using fuzz::Mutator;

// A parsed value takes some tens of bytes for each written byte ("0," in a list, "[],"), and its
// growing list takes them once more. A token of yaml-cpp ("{") takes some 250, which is why a
// configuration file is small.
constexpr size_t kBytesPerByte = 400;
constexpr size_t kBytesAlways = 256 << 10;
constexpr size_t kMaxMessageBytes = 3000;

// Each round's files are in memory if the machine has a place for that.
const bool in_memory =
    std::filesystem::is_directory("/dev/shm") && setenv("TMPDIR", "/dev/shm", 1) == 0;

std::string Text(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  REQUIRE(text.ok());
  return *text;
}

// Reads `rounds` damaged inputs. Some must be taken and some refused; otherwise the damage is not
// as meant.
void Fuzz(int rounds, std::vector<std::string> corpus,
          const std::function<absl::Status(const std::string&)>& read,
          size_t bytes_always = kBytesAlways) {
  Mutator mutator(TestSeed(), std::move(corpus));
  int taken = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string text = mutator.Next();
    AllocationMeter meter;
    const absl::Status status = read(text);
    const size_t peak = meter.peak_bytes();
    INFO("round " << round << ", " << text.size() << " bytes, status " << status.ToString());
    if (peak > bytes_always + kBytesPerByte * text.size()) FAIL("took " << peak << " bytes");
    if (status.ok()) {
      ++taken;
      continue;
    }
    const std::string message(status.message());
    if (message.empty() || message.size() > kMaxMessageBytes ||
        message.find('\n') != std::string::npos) {
      FAIL("not one short line");
    }
  }
  CHECK(taken > 0);
  CHECK(taken < rounds);
}

// Returns DeepSeek-V3.2's settings in the spelling of its checkpoint, or those of DeepSeek-V3.
std::string AsPublished(bool indexer) {
  std::string text =
      R"({"hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280,)"
      R"( "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,)"
      R"( "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,)"
      R"( "v_head_dim": 128, "first_k_dense_replace": 3, "moe_intermediate_size": 2048,)"
      R"( "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,)"
      R"( "norm_topk_prob": true, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,)"
      R"( "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,)"
      R"( "topk_method": "noaux_tc", "max_position_embeddings": 163840, "rms_norm_eps": 1e-06,)"
      R"( "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,)"
      R"( "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,)"
      R"( "original_max_position_embeddings": 4096}, "quantization_config": {"quant_method": "fp8",)"
      R"( "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},)"
      R"( "tie_word_embeddings": false, "attention_bias": false, "model_type": )";
  text += indexer
              ? R"("deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048})"
              : R"("deepseek_v3"})";
  return text;
}

TEST_CASE("a damaged config.json is read or refused") {
  TempDir dir;
  std::vector<std::string> corpus;
  std::vector<std::string> models = fixtures::TinyModels();
  models.insert(models.end(), fixtures::TinyLatentModels().begin(),
                fixtures::TinyLatentModels().end());
  for (const std::string& name : models) {
    corpus.push_back(Text(fixtures::SourceDir(name) + "/config.json"));
  }
  for (const bool indexer : {true, false}) corpus.push_back(AsPublished(indexer));
  Fuzz(10000, corpus, [&](const std::string& text) {
    REQUIRE(WriteFile(dir.File("config.json"), text).ok());
    return LoadModelConfig(dir.path()).status();
  });
}

TEST_CASE("a damaged generation_config.json is read or refused") {
  TempDir dir;
  REQUIRE(
      WriteFile(dir.File("config.json"), Text(fixtures::SourceDir("tiny-llama") + "/config.json"))
          .ok());
  Fuzz(5000, {R"({"eos_token_id": [2, 3], "bos_token_id": 1, "do_sample": true})"},
       [&](const std::string& text) {
         REQUIRE(WriteFile(dir.File("generation_config.json"), text).ok());
         return LoadModelConfig(dir.path()).status();
       });
}

TEST_CASE("a damaged safetensors file is read or refused") {
  TempDir dir;
  const std::string path = dir.File("model.safetensors");
  std::vector<fixtures::RawTensor> tensors;
  tensors.push_back({"model.a", TensorType::kBF16, {4, 8}, std::string(64, 'a')});
  tensors.push_back({"model.b", TensorType::kF32, {3}, std::string(12, 'b')});
  tensors.push_back({"model.c", TensorType::kU8, {}, "c"});
  REQUIRE(fixtures::WriteSafetensors(path, tensors).ok());
  Fuzz(10000, {Text(path)}, [&](const std::string& text) {
    REQUIRE(WriteFile(path, text).ok());
    const auto file = SafetensorsFile::Open(path);
    if (!file.ok()) return file.status();
    // Every tensor that the file lists can be read, to the last byte.
    for (const auto& [name, tensor] : (*file)->tensors()) {
      std::string bytes(tensor.bytes, '\0');
      REQUIRE((*file)->Read(tensor, 0, tensor.bytes, bytes.data()).ok());
      REQUIRE(bytes ==
              std::string(reinterpret_cast<const char*>((*file)->Data(tensor)), tensor.bytes));
    }
    return absl::OkStatus();
  });
}

TEST_CASE("a damaged header of a safetensors file, of the right length, is read or refused") {
  TempDir dir;
  const std::string path = dir.File("model.safetensors");
  const std::string header = R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})";
  Fuzz(10000, {header}, [&](const std::string& text) {
    std::string file(8, '\0');
    for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(text.size() >> (8 * i));
    REQUIRE(WriteFile(path, file + text + std::string(16, 'x')).ok());
    return SafetensorsFile::Open(path).status();
  });
}

TEST_CASE("a damaged index is read or refused") {
  TempDir dir;
  REQUIRE(
      fixtures::WriteSafetensors(dir.File("a.safetensors"), {{"x", TensorType::kBF16, {1}, "xx"}})
          .ok());
  Fuzz(5000, {R"({"metadata": {"total_size": 2}, "weight_map": {"x": "a.safetensors"}})"},
       [&](const std::string& text) {
         REQUIRE(WriteFile(dir.File("model.safetensors.index.json"), text).ok());
         return Checkpoint::Open(dir.path()).status();
       });
}

TEST_CASE("a damaged tokenizer.json is read or refused") {
  TempDir dir;
  const std::string path = dir.File("tokenizer.json");
  const std::string bpe =
      R"({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, "model": {"vocab": )"
      R"({"a": 0, "b\u0120": 1, "<0x0A>": 2}, "merges": ["a b"]}, "added_tokens": )"
      R"([{"id": 3, "content": "<|end|>", "special": true}]})";
  const std::string unigram = R"({"decoder": {"type": "ByteFallback"}, "model": {"vocab": )"
                              R"([["a", -1.5], ["\u2581b", 0]]}})";
  // The worst file has 65,536 empty texts, while the table that they are in grows.
  constexpr size_t kBytesOfStrayId = size_t{8} << 20;
  Fuzz(
      4000, {bpe, unigram},
      [&](const std::string& text) {
        REQUIRE(WriteFile(path, text).ok());
        const auto loaded = TokenBytes::Load(path);
        if (loaded.ok()) {
          for (int32_t id = -1; id <= loaded->size(); ++id) (void)loaded->Bytes(id);
        }
        return loaded.status();
      },
      kBytesOfStrayId);
}

TEST_CASE("a damaged configuration file is read or refused") {
  const std::vector<std::string> corpus = {
      "model: /models/x\nhbm_bytes: 1GiB  # all of it\nlisten: \"[::1]:7000\"\n",
      R"({"model": "x", "max_sequences": 4, "log_prompts": true})",
      "a: &a [x, x]\nb: &b [*a, *a]\nc: |\n  text\n  more\nd: >-\n  folded\n? e\n: !!str f\n",
      "%YAML 1.2\n---\nmodel: 'it''s'\n...\n"};
  // The first read makes the table of all settings, which stays and is no reader's.
  REQUIRE(ParseConfigText("model: /models/x\n", "c.yaml").ok());
  Fuzz(10000, corpus,
       [](const std::string& text) { return ParseConfigText(text, "c.yaml").status(); });
}

}  // namespace
}  // namespace sluice
