#include "src/model/dummy_weights.h"

#include <catch2/catch.hpp>
#include <vector>

#include "src/base/dtype.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

std::vector<float> FirstThree(const std::string& name) {
  std::vector<float> out(3);
  DummyUniform(name, kDummySeed, 0, absl::MakeSpan(out));
  return out;
}

TEST_CASE("uniform() gives the published check values") {
  CHECK(FirstThree("model.embed_tokens.weight") ==
        std::vector<float>{0.24323928356170654f, 0.27931106090545654f, -0.38366377353668213f});
  CHECK(FirstThree("model.layers.0.self_attn.q_proj.weight") ==
        std::vector<float>{-0.0020177364349365234f, -0.44702470302581787f, -0.9137581586837769f});
  CHECK(FirstThree("model.layers.1.mlp.experts.3.down_proj.weight") ==
        std::vector<float>{0.6097730398178101f, 0.9894236326217651f, -0.2573508024215698f});
}

TEST_CASE("any part of a dummy tensor is the same part of the whole") {
  const TensorSpec spec{"model.layers.0.mlp.up_proj.weight", {96, 64}};
  std::vector<uint16_t> whole(96 * 64), part(1000);
  FillDummy(spec, false, kDummySeed, 0, absl::MakeSpan(whole));
  FillDummy(spec, false, kDummySeed, 777, absl::MakeSpan(part));
  CHECK(std::equal(part.begin(), part.end(), whole.begin() + 777));
}

TEST_CASE("each kind of tensor has its own scale") {
  const auto largest = [](const std::string& name, std::vector<int64_t> shape, bool tied) {
    std::vector<uint16_t> values(4096);
    FillDummy({name, std::move(shape)}, tied, kDummySeed, 0, absl::MakeSpan(values));
    float out = 0;
    for (const uint16_t v : values) out = std::max(out, std::abs(BFloat16ToFloat(v)));
    return out;
  };
  const std::vector<int64_t> square{64, 64};
  CHECK(largest("model.layers.0.self_attn.q_proj.weight", square, false) ==
        Approx(0.25).epsilon(.01));
  CHECK(largest("model.layers.0.self_attn.v_proj.weight", square, false) ==
        Approx(0.35).epsilon(.01));
  CHECK(largest("model.layers.0.self_attn.o_proj.weight", square, false) ==
        Approx(.175).epsilon(.01));
  CHECK(largest("model.layers.0.self_attn.q_proj.bias", {4096}, false) == Approx(0.2).epsilon(.01));
  CHECK(largest("model.layers.0.self_attn.q_norm.weight", {4096}, false) ==
        Approx(1.3).epsilon(.01));
  CHECK(largest("model.embed_tokens.weight", square, false) == Approx(1.7).epsilon(.01));
  CHECK(largest("model.embed_tokens.weight", square, true) == Approx(0.25).epsilon(.01));
  CHECK(largest("lm_head.weight", square, false) == Approx(0.35).epsilon(.01));
}

TEST_CASE("dummy weights equal the checkpoint that the formula wrote") {
  for (const std::string& name : fixtures::TinyModels()) {
    const std::string& dir = fixtures::ModelDir(name);
    const auto config = LoadModelConfig(dir);
    REQUIRE(config.ok());
    auto stored = OpenCheckpoint(dir, *config);
    INFO(stored.status());
    REQUIRE(stored.ok());
    const auto dummy = DummyWeights(*config);
    for (const TensorSpec& spec : ExpectedTensors(*config)) {
      INFO(spec.name);
      if (spec.shape.size() == 1) {
        CHECK(dummy->Vector(spec.name, spec.shape[0]).value() ==
              (*stored)->Vector(spec.name, spec.shape[0]).value());
        continue;
      }
      const auto a = dummy->Matrix(spec.name, spec.shape[0], spec.shape[1]);
      const auto b = (*stored)->Matrix(spec.name, spec.shape[0], spec.shape[1]);
      REQUIRE(a.ok());
      REQUIRE(b.ok());
      CHECK(std::equal(a->data(), a->data() + spec.elements(), b->data()));
    }
  }
}

TEST_CASE("a dummy tensor that the config does not imply is refused") {
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir("tiny-llama")).value();
  const auto dummy = DummyWeights(config);
  CHECK(absl::IsNotFound(dummy->Matrix("model.layers.9.mlp.up_proj.weight", 256, 128).status()));
  CHECK(absl::IsInvalidArgument(dummy->Matrix("lm_head.weight", 512, 64).status()));
}

}  // namespace
}  // namespace sluice
