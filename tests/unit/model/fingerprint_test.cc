#include "src/model/fingerprint.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <set>

#include "src/base/dtype.h"
#include "src/model/checkpoint.h"
#include "src/model/dummy_weights.h"
#include "src/model/tensor_list.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

std::string FingerprintOf(const std::string& dir) {
  const auto config = LoadModelConfig(dir);
  REQUIRE(config.ok());
  auto weights = OpenCheckpoint(dir, *config);
  INFO(weights.status());
  REQUIRE(weights.ok());
  const auto out = Fingerprint(*config, **weights);
  REQUIRE(out.ok());
  return *out;
}

// Returns the tensors of a model's directory, as BF16 or widened to F32.
std::vector<fixtures::RawTensor> Tensors(const std::string& dir, TensorType type) {
  const auto checkpoint = Checkpoint::Open(dir);
  REQUIRE(checkpoint.ok());
  std::vector<fixtures::RawTensor> out;
  for (const auto& [name, entry] : checkpoint->tensors()) {
    const auto* from = reinterpret_cast<const uint16_t*>(entry.file->Data(*entry.tensor));
    std::string bytes;
    for (int64_t i = 0; i < entry.tensor->elements(); ++i) {
      const float wide = BFloat16ToFloat(from[i]);
      if (type == TensorType::kF32) {
        bytes.append(reinterpret_cast<const char*>(&wide), 4);
      } else {
        bytes.append(reinterpret_cast<const char*>(&from[i]), 2);
      }
    }
    out.push_back({name, type, entry.tensor->shape, std::move(bytes)});
  }
  return out;
}

// A copy of a fixture with its weights in one file.
void WriteCopy(const std::string& from, const std::string& to,
               const std::vector<fixtures::RawTensor>& tensors) {
  fs::copy_file(from + "/config.json", to + "/config.json", fs::copy_options::overwrite_existing);
  REQUIRE(fixtures::WriteSafetensors(to + "/model.safetensors", tensors).ok());
}

TEST_CASE("a fingerprint is 64 hexadecimal digits, each model its own") {
  std::set<std::string> seen;
  for (const std::string& name : fixtures::TinyModels()) {
    const std::string f = FingerprintOf(fixtures::ModelDir(name));
    CHECK(f.size() == 64);
    CHECK(f.find_first_not_of("0123456789abcdef") == std::string::npos);
    seen.insert(f);
  }
  CHECK(seen.size() == 3);
}

TEST_CASE("shards, one file, F32 and the dummy formula give one fingerprint") {
  const std::string& shards = fixtures::ModelDir("tiny-qwen2");
  const std::string expected = FingerprintOf(shards);
  const fixtures::TempDir copy;
  WriteCopy(shards, copy.path(), Tensors(shards, TensorType::kBF16));
  CHECK(FingerprintOf(copy.path()) == expected);
  WriteCopy(shards, copy.path(), Tensors(shards, TensorType::kF32));
  CHECK(FingerprintOf(copy.path()) == expected);

  const ModelConfig config = LoadModelConfig(shards).value();
  CHECK(Fingerprint(config, *DummyWeights(config)).value() == expected);
}

TEST_CASE("any one tensor that changes everywhere changes the fingerprint") {
  const std::string& base = fixtures::ModelDir("tiny-qwen3");
  std::vector<fixtures::RawTensor> tensors = Tensors(base, TensorType::kBF16);
  std::set<std::string> seen{FingerprintOf(base)};
  const fixtures::TempDir copy;
  // These are one tensor of every kind: all of the first layer's, and those outside the layers.
  size_t changed = 0;
  for (fixtures::RawTensor& tensor : tensors) {
    if (tensor.name.find("layers.1.") != std::string::npos ||
        tensor.name.find("layers.2.") != std::string::npos) {
      continue;
    }
    INFO(tensor.name);
    const std::string before = tensor.bytes;
    for (size_t i = 0; i < tensor.bytes.size(); i += 2) tensor.bytes[i] ^= 1;  // the last bit
    WriteCopy(base, copy.path(), tensors);
    CHECK(seen.insert(FingerprintOf(copy.path())).second);
    tensor.bytes = before;
    ++changed;
  }
  CHECK(changed == 14);
}

TEST_CASE("the first and the last element of a large tensor are sampled") {
  const std::string& base = fixtures::ModelDir("tiny-llama");
  std::vector<fixtures::RawTensor> tensors = Tensors(base, TensorType::kBF16);
  const fixtures::TempDir copy;
  for (const bool last : {false, true}) {
    std::string& bytes = tensors[0].bytes;  // lm_head.weight
    char& byte = last ? bytes[bytes.size() - 2] : bytes[0];
    byte ^= 1;
    WriteCopy(base, copy.path(), tensors);
    CHECK(FingerprintOf(copy.path()) != FingerprintOf(base));
    byte ^= 1;
  }
}

TEST_CASE("config fields that enter the computation change the fingerprint, others do not") {
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  const auto print = [](const ModelConfig& c) { return Fingerprint(c, *DummyWeights(c)).value(); };
  std::set<std::string> seen{print(config)};
  const auto differs = [&](auto change) {
    ModelConfig c = config;
    change(c);
    return seen.insert(print(c)).second;
  };
  CHECK(differs([](ModelConfig& c) { c.rms_norm_eps = 1e-6f; }));
  CHECK(differs([](ModelConfig& c) { c.rope.theta = 10000; }));
  CHECK(differs([](ModelConfig& c) { c.rope.factor = 4; }));
  CHECK(differs([](ModelConfig& c) { c.rope.kind = RopeKind::kLinear; }));
  CHECK(differs([](ModelConfig& c) { c.rope.original_max_position_embeddings = 2048; }));
  CHECK(differs([](ModelConfig& c) { c.heads = 2, c.kv_heads = 1, c.head_dim = 128; }));
  CHECK(differs([](ModelConfig& c) { c.architecture = "qwen2"; }));

  ModelConfig other = config;
  other.name = "elsewhere";
  other.eos_token_ids = {7};
  other.max_position_embeddings = 100;
  CHECK(print(other) == print(config));
}

}  // namespace
}  // namespace sluice
