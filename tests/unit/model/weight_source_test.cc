#include "src/model/weight_source.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "src/base/dtype.h"
#include "src/model/checkpoint.h"
#include "src/model/tensor_list.h"
#include "tests/fixtures/fixtures.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using fixtures::RawTensor;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Returns the tensors of tiny-llama as they are stored, for tests that break them one by one.
std::vector<RawTensor> LlamaTensors() {
  const auto checkpoint = Checkpoint::Open(fixtures::ModelDir("tiny-llama"));
  REQUIRE(checkpoint.ok());
  std::vector<RawTensor> out;
  for (const auto& [name, entry] : checkpoint->tensors()) {
    out.push_back({name, entry.tensor->type, entry.tensor->shape,
                   std::string(reinterpret_cast<const char*>(entry.file->Data(*entry.tensor)),
                               entry.tensor->bytes)});
  }
  return out;
}

RawTensor& Named(std::vector<RawTensor>& tensors, const std::string& name) {
  for (RawTensor& t : tensors) {
    if (t.name == name) return t;
  }
  FAIL(name);
  return tensors[0];
}

struct Opened {
  fixtures::TempDir dir;
  ModelConfig config;
  absl::StatusOr<std::unique_ptr<WeightSource>> source = absl::UnknownError("not opened");
};

// Opens tiny-llama's config with these tensors.
std::unique_ptr<Opened> Open(const std::vector<RawTensor>& tensors, bool tied = false) {
  auto out = std::make_unique<Opened>();
  REQUIRE(fixtures::WriteSafetensors(out->dir.File("model.safetensors"), tensors).ok());
  out->config = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  out->config.tie_word_embeddings = tied;
  out->source = OpenCheckpoint(out->dir.path(), out->config);
  return out;
}

bool Says(const absl::Status& status, const std::vector<std::string>& words) {
  const std::string message(status.message());
  INFO(message);
  for (const std::string& word : words) {
    INFO("expected in it: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
  return !status.ok();
}

TEST_CASE("the expected tensors are exactly those of the fixtures") {
  for (const std::string& name : fixtures::TinyModels()) {
    const ModelConfig config = LoadModelConfig(fixtures::SourceDir(name)).value();
    const auto checkpoint = Checkpoint::Open(fixtures::ModelDir(name));
    INFO(checkpoint.status());
    REQUIRE(checkpoint.ok());
    const auto expected = ExpectedTensors(config);
    CHECK(expected.size() == checkpoint->tensors().size());
    for (const TensorSpec& spec : expected) CHECK(checkpoint->Find(spec.name) != nullptr);
    auto source = OpenCheckpoint(fixtures::ModelDir(name), config);
    REQUIRE(source.ok());
    CHECK((*source)->CheckNoLeftovers().ok());
  }
}

TEST_CASE("every bias that a config asks for is expected") {
  ModelConfig config = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  const size_t without = ExpectedTensors(config).size();
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  CHECK(ExpectedTensors(config).size() == without + 3u * 7u);
}

TEST_CASE("a BF16 matrix is used as mapped, and released pages come back when touched") {
  const std::string& dir = fixtures::ModelDir("tiny-llama");
  const ModelConfig config = LoadModelConfig(dir).value();
  const auto source = OpenCheckpoint(dir, config);
  REQUIRE(source.ok());
  auto view = (*source)->Matrix("lm_head.weight", 512, 128);
  REQUIRE(view.ok());
  CHECK_FALSE(view->owned());
  CHECK(view->owned_bytes() == 0);
  const std::vector<uint16_t> before(view->data(), view->data() + 512 * 128);
  const uint16_t* data = view->data();
  (*source)->Release(*std::move(view));
  CHECK(std::equal(before.begin(), before.end(), data));
}

TEST_CASE("F32 and F16 matrices are rounded to bf16 once and owned by their view") {
  std::mt19937_64 rng(TestSeed());
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<RawTensor> tensors = LlamaTensors();
  RawTensor& wide = Named(tensors, "model.layers.0.self_attn.k_proj.weight");  // [128, 128]
  std::vector<float> floats(128 * 128);
  for (float& f : floats) f = normal(rng);
  floats[0] = 1.00390625f;  // halfway between two bf16 values: rounds to the even one, 1.0
  floats[1] = 1.01171875f;  // halfway: rounds up to the even one, 1.015625
  wide.type = TensorType::kF32;
  wide.bytes = Bytes(floats);

  RawTensor& half = Named(tensors, "model.layers.0.self_attn.v_proj.weight");
  const std::vector<std::pair<uint16_t, float>> known = {
      {0x0000, 0.0f},        {0x8000, -0.0f},    {0x3C00, 1.0f},
      {0xC000, -2.0f},       {0x7BFF, 65536.0f},  // 65504, the largest, rounds up to 2^16 in bf16
      {0x0400, 0x1p-14f},                         // the smallest normal
      {0x0001, 0x1p-24f},                         // the smallest subnormal
      {0x83FF, -0x1p-14f},  // the largest subnormal, -1023 * 2^-24, rounds to -2^-14
      {0x3555, 0.333984375f}};
  std::vector<uint16_t> halves(128 * 128, 0x3C00);
  for (size_t i = 0; i < known.size(); ++i) halves[i] = known[i].first;
  half.type = TensorType::kF16;
  half.bytes = Bytes(halves);

  const auto opened = Open(tensors);
  INFO(opened->source.status());
  REQUIRE(opened->source.ok());
  WeightSource& source = **opened->source;
  const auto k = source.Matrix(wide.name, 128, 128);
  REQUIRE(k.ok());
  CHECK(k->owned_bytes() == 128 * 128 * 2);
  for (size_t i = 0; i < floats.size(); ++i) {
    REQUIRE(k->data()[i] == FloatToBFloat16(floats[i]));
  }
  CHECK(BFloat16ToFloat(k->data()[0]) == 1.0f);
  CHECK(BFloat16ToFloat(k->data()[1]) == 1.015625f);

  const auto v = source.Matrix(half.name, 128, 128);
  REQUIRE(v.ok());
  CHECK(v->owned());
  for (size_t i = 0; i < known.size(); ++i) {
    INFO(i);
    const float found = BFloat16ToFloat(v->data()[i]);
    CHECK(found == known[i].second);
    CHECK(std::signbit(found) == std::signbit(known[i].second));
  }
  CHECK(BFloat16ToFloat(v->data()[1000]) == 1.0f);

  std::vector<uint16_t> some(10);
  REQUIRE(source.ReadBFloat16(wide.name, {128, 128}, 500, absl::MakeSpan(some)).ok());
  CHECK(std::equal(some.begin(), some.end(), k->data() + 500));
}

TEST_CASE("vectors come as float32, from BF16, F16 and F32 alike") {
  std::vector<RawTensor> tensors = LlamaTensors();
  RawTensor& f32 = Named(tensors, "model.norm.weight");
  f32.type = TensorType::kF32;
  f32.bytes = Bytes(std::vector<float>(128, 1.0001f));
  RawTensor& f16 = Named(tensors, "model.layers.0.input_layernorm.weight");
  f16.type = TensorType::kF16;
  f16.bytes = Bytes(std::vector<uint16_t>(128, 0x3E01));  // 1.5009765625
  RawTensor& bf16 = Named(tensors, "model.layers.1.input_layernorm.weight");
  bf16.bytes = Bytes(std::vector<uint16_t>(128, 0x3FC0));  // 1.5
  const auto opened = Open(tensors);
  REQUIRE(opened->source.ok());
  WeightSource& source = **opened->source;
  CHECK(source.Vector(f32.name, 128).value() == std::vector<float>(128, 1.0001f));
  CHECK(source.Vector(f16.name, 128).value() == std::vector<float>(128, 1.5009765625f));
  CHECK(source.Vector(bf16.name, 128).value() == std::vector<float>(128, 1.5f));
}

TEST_CASE("a BF16 matrix at an odd address is copied") {
  std::vector<RawTensor> tensors = LlamaTensors();
  tensors.insert(tensors.begin(),
                 {"model.layers.0.self_attn.rotary_emb.inv_freq", TensorType::kU8, {1}, "x"});
  const auto opened = Open(tensors);
  INFO(opened->source.status());
  REQUIRE(opened->source.ok());
  CHECK((*opened->source)->CheckNoLeftovers().ok());  // old checkpoints have that buffer
  const auto view = (*opened->source)->Matrix("lm_head.weight", 512, 128);
  REQUIRE(view.ok());
  CHECK(view->owned());
  CHECK(std::memcmp(view->data(), Named(tensors, "lm_head.weight").bytes.data(), 512 * 128 * 2) ==
        0);
}

TEST_CASE("a missing tensor, another shape and another dtype are named") {
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  std::vector<RawTensor> tensors = LlamaTensors();
  const RawTensor good = Named(tensors, name);

  Named(tensors, name).shape = {128, 256};
  CHECK(Says(Open(tensors)->source.status(), {name, "expected shape [256, 128]", "[128, 256]"}));
  Named(tensors, name) = {name, TensorType::kI16, good.shape, good.bytes};
  CHECK(Says(Open(tensors)->source.status(), {name, "BF16, F16 or F32", "found I16"}));
  Named(tensors, name).name = "other";
  CHECK(Says(Open(tensors)->source.status(), {name, "missing", "[256, 128]"}));
  // If there are many, some are named and the others counted.
  CHECK(Says(Open({good})->source.status(), {"lm_head.weight", "and 21 more"}));
}

TEST_CASE("asking for what is not there is refused") {
  const auto opened = Open(LlamaTensors());
  REQUIRE(opened->source.ok());
  WeightSource& source = **opened->source;
  CHECK(absl::IsNotFound(source.Matrix("nothing", 1, 1).status()));
  CHECK(absl::IsInvalidArgument(source.Matrix("lm_head.weight", 128, 512).status()));
  CHECK(absl::IsInvalidArgument(source.Vector("model.norm.weight", 64).status()));
  CHECK(absl::IsInvalidArgument(source.Vector("lm_head.weight", 512).status()));
}

TEST_CASE("tensors that the config does not imply are named, but for a tied head's copy") {
  std::vector<RawTensor> tensors = LlamaTensors();
  tensors.push_back({"model.layers.0.self_attn.q_proj.bias", TensorType::kBF16, {1}, "xx"});
  tensors.push_back({"model.layers.3.mlp.up_proj.weight", TensorType::kBF16, {1}, "xx"});
  const auto extra = Open(tensors);
  REQUIRE(extra->source.ok());
  CHECK(Says((*extra->source)->CheckNoLeftovers(),
             {"2 tensors", "model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj"}));

  const auto tied = Open(LlamaTensors(), true);  // lm_head.weight is there all the same
  REQUIRE(tied->source.ok());
  CHECK((*tied->source)->CheckNoLeftovers().ok());
}

TEST_CASE("a model's directory without weights, or with a truncated file, is refused") {
  const fixtures::TempDir dir;
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  CHECK(absl::IsNotFound(OpenCheckpoint(dir.path(), config).status()));
  const std::string path = dir.File("model.safetensors");
  fs::copy_file(fixtures::ModelDir("tiny-llama") + "/model.safetensors", path);
  for (const uint64_t size :
       {fs::file_size(path) - 1, uint64_t{5000}, uint64_t{100}, uint64_t{0}}) {
    fs::resize_file(path, size);
    CHECK(Says(OpenCheckpoint(dir.path(), config).status(), {"model.safetensors", "truncated"}));
  }
}

}  // namespace
}  // namespace sluice
