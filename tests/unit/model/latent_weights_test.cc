// Tests of the weights of models with latent attention: e4m3 with scales, experts, and layers that
// draft.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <random>

#include "absl/strings/match.h"
#include "kernels/e4m3.h"
#include "kernels/weight_formula.h"
#include "src/base/dtype.h"
#include "src/base/sha256.h"
#include "src/model/checkpoint.h"
#include "src/model/fingerprint.h"
#include "src/model/model.h"
#include "src/model/tensor_list.h"
#include "src/model/weight_source.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"

namespace sluice {
namespace {

using fixtures::RawTensor;

constexpr char kBFloat16Model[] = "tiny-deepseek-v32";
constexpr char kFp8Model[] = "tiny-deepseek-v32-fp8";
constexpr char kMatrix[] = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight";  // [576, 192]

std::vector<float> Floats(const MatrixView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows() * view.cols()));
  for (int64_t row = 0; row < view.rows(); ++row) {
    view.FloatRow(row, out.data() + row * view.cols());
  }
  return out;
}

std::vector<RawTensor> Tensors(const std::string& model) {
  const auto checkpoint = Checkpoint::Open(fixtures::ModelDir(model));
  REQUIRE(checkpoint.ok());
  std::vector<RawTensor> out;
  for (const auto& [name, entry] : checkpoint->tensors()) {
    out.push_back({name, entry.tensor->type, entry.tensor->shape,
                   std::string(reinterpret_cast<const char*>(entry.file->Data(*entry.tensor)),
                               entry.tensor->bytes)});
  }
  return out;
}

struct Opened {
  fixtures::TempDir dir;
  ModelConfig config;
  absl::StatusOr<std::unique_ptr<WeightSource>> source = absl::UnknownError("not opened");
};

// A fixture whose tensor `name` was changed.
std::unique_ptr<Opened> OpenWith(const std::string& model, const std::string& name,
                                 const std::function<void(RawTensor&)>& change) {
  auto out = std::make_unique<Opened>();
  std::vector<RawTensor> tensors = Tensors(model);
  const auto it = std::find_if(tensors.begin(), tensors.end(),
                               [&](const RawTensor& t) { return t.name == name; });
  REQUIRE(it != tensors.end());
  change(*it);
  REQUIRE(fixtures::WriteSafetensors(out->dir.File("model.safetensors"), tensors).ok());
  out->config = LoadModelConfig(fixtures::SourceDir(model)).value();
  out->source = OpenCheckpoint(out->dir.path(), out->config);
  return out;
}

void CheckRefused(const Opened& opened, const std::vector<std::string>& words) {
  REQUIRE_FALSE(opened.source.ok());
  const std::string message(opened.source.status().message());
  INFO(message);
  for (const std::string& word : words) CHECK(absl::StrContains(message, word));
}

TEST_CASE("latent fixtures are byte for byte what their golden outputs were computed from") {
  const auto digest = [](const std::string& name) {
    return Sha256Hex(fixtures::ReadFile(fixtures::ModelDir(name) + "/model.safetensors").value());
  };
  CHECK(digest(kBFloat16Model) ==
        "f347ab5d71c3dfc1b8051693e3e15c64e3246763ccf7082385e810ed17161214");
  CHECK(digest(kFp8Model) == "338f906a61580416de157b85b34b27ba92c2347bf233036490f78ba4eb41dbc9");
}

TEST_CASE("the expected tensors are exactly those of latent fixtures") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const ModelConfig config = LoadModelConfig(fixtures::SourceDir(name)).value();
    const auto checkpoint = Checkpoint::Open(fixtures::ModelDir(name));
    REQUIRE(checkpoint.ok());
    const auto expected = ExpectedTensors(config);
    CHECK(expected.size() == checkpoint->tensors().size());
    for (const TensorSpec& spec : expected) {
      INFO(spec.name);
      const Checkpoint::Entry* entry = checkpoint->Find(spec.name);
      REQUIRE(entry != nullptr);
      CHECK(entry->tensor->shape == spec.shape);
      CHECK((entry->tensor->type == TensorType::kF8E4M3) == (spec.form == TensorForm::kFp8));
    }
    auto source = OpenCheckpoint(fixtures::ModelDir(name), config);
    REQUIRE(source.ok());
    CHECK((*source)->CheckNoLeftovers().ok());
  }
}

TEST_CASE("an e4m3 matrix comes as stored, with its scales") {
  const auto opened = OpenWith(kFp8Model, kMatrix, [](RawTensor&) {});
  REQUIRE(opened->source.ok());
  WeightSource& source = **opened->source;
  CHECK(source.IsFp8(kMatrix));
  CHECK_FALSE(source.IsFp8("model.layers.1.mlp.gate.weight"));
  auto view = source.Matrix(kMatrix, 576, 192);
  REQUIRE(view.ok());
  CHECK(view->data() == nullptr);
  REQUIRE(view->fp8() != nullptr);
  CHECK_FALSE(view->owned());
  REQUIRE(view->scales().size() == 5 * 2);
  const std::vector<float> wide = Floats(*view);
  for (const int64_t row : {0, 127, 128, 575}) {
    for (const int64_t col : {0, 127, 128, 191}) {
      const int64_t i = row * 192 + col;
      const float scale = view->scales()[static_cast<size_t>(row / 128 * 2 + col / 128)];
      CHECK(wide[static_cast<size_t>(i)] == kernels::E4M3ToFloat(view->fp8()[i]) * scale);
    }
  }
  // The bf16 fixture has the same values within e4m3's precision, which is half a step of 1/8 of
  // the value, or of the smallest step of its block.
  auto exact = OpenCheckpoint(fixtures::ModelDir(kBFloat16Model),
                              LoadModelConfig(fixtures::SourceDir(kBFloat16Model)).value());
  REQUIRE(exact.ok());
  const std::vector<float> want = Floats((*exact)->Matrix(kMatrix, 576, 192).value());
  const float largest = *std::max_element(view->scales().begin(), view->scales().end());
  for (size_t i = 0; i < want.size(); ++i) {
    REQUIRE(std::abs(wide[i] - want[i]) <= std::abs(want[i]) / 16 + largest * 0x1p-10f);
  }
  source.Release(*std::move(view));
}

TEST_CASE("scales that are missing or do not fit are named") {
  const std::string scales = std::string(kMatrix) + "_scale_inv";
  CheckRefused(*OpenWith(kFp8Model, scales, [](RawTensor& t) { t.name = "other"; }),
               {scales, "missing", "[5, 2]"});
  CheckRefused(*OpenWith(kFp8Model, scales,
                         [](RawTensor& t) {
                           t.shape = {2, 5};
                         }),
               {scales, "[5, 2]", "[2, 5]"});
  CheckRefused(*OpenWith(kFp8Model, scales,
                         [](RawTensor& t) {
                           t.type = TensorType::kBF16;
                           t.bytes.resize(t.bytes.size() / 2);
                         }),
               {scales, "F32", "BF16"});
}

TEST_CASE("e4m3 without quantization_config is refused, and the reverse") {
  CheckRefused(*OpenWith(kBFloat16Model, kMatrix,
                         [](RawTensor& t) {
                           t.type = TensorType::kF8E4M3;
                           t.bytes.resize(t.bytes.size() / 2);
                         }),
               {kMatrix, "F8_E4M3", "no quantization_config"});
  CheckRefused(*OpenWith(kFp8Model, kMatrix,
                         [](RawTensor& t) {
                           t.type = TensorType::kBF16;
                           t.bytes.resize(t.bytes.size() * 2);
                         }),
               {kMatrix, "F8_E4M3", "BF16", "quantization_config"});
  // This tensor is never quantised.
  CheckRefused(*OpenWith(kFp8Model, "model.layers.1.mlp.gate.weight",
                         [](RawTensor& t) {
                           t.type = TensorType::kF8E4M3;
                           t.bytes.resize(t.bytes.size() / 2);
                         }),
               {"mlp.gate.weight", "BF16, F16 or F32", "F8_E4M3"});
}

TEST_CASE("layers that draft are passed over, others past the last are not") {
  auto tensors = Tensors(kBFloat16Model);
  tensors.push_back({"model.layers.3.eh_proj.weight", TensorType::kBF16, {1}, "xx"});
  const fixtures::TempDir dir;
  REQUIRE(fixtures::WriteSafetensors(dir.File("model.safetensors"), tensors).ok());
  ModelConfig config = LoadModelConfig(fixtures::SourceDir(kBFloat16Model)).value();
  const auto leftovers = [&] {
    return OpenCheckpoint(dir.path(), config).value()->CheckNoLeftovers();
  };
  CHECK_FALSE(leftovers().ok());
  config.latent->next_token_layers = 1;
  CHECK(leftovers().ok());
}

TEST_CASE("a next-token layer is loaded where it is asked for, and what it lacks is named") {
  using DraftLayer = Model::Options::DraftLayer;
  const auto device = OrFail(testing::TestDevice("portable"));
  const auto load = [&](const std::string& dir, DraftLayer layer) {
    Model::Options options;
    options.directory = dir;
    options.max_rows = options.max_logits = 4;
    options.draft_layer = layer;
    return Model::Load(options, device.get());
  };
  for (const std::string& name : fixtures::TinyDraftModels()) {
    const std::string& dir = fixtures::ModelDir(name);
    const auto without = OrFail(load(dir, DraftLayer::kNone));
    const auto with = OrFail(load(dir, DraftLayer::kRequired));
    CHECK_FALSE(without->drafts());
    CHECK(with->drafts());
    CHECK(OrFail(load(dir, DraftLayer::kIfThere))->drafts());
    // Nodes with and without it exchange caches, and the fingerprint has their layout.
    CHECK(with->fingerprint() == without->fingerprint());
    CHECK(with->weight_bytes() > without->weight_bytes() * 5 / 4);
  }
  const auto plain = load(fixtures::ModelDir(kBFloat16Model), DraftLayer::kRequired);
  CHECK(absl::IsInvalidArgument(plain.status()));
  for (const char* word : {"speculation: mtp needs", "num_nextn_predict_layers", "ngram or none"}) {
    CHECK(absl::StrContains(plain.status().message(), word));
  }
  CHECK_FALSE(OrFail(load(fixtures::ModelDir(kBFloat16Model), DraftLayer::kIfThere))->drafts());
  CHECK_FALSE(OrFail(load(fixtures::ModelDir("tiny-qwen3"), DraftLayer::kIfThere))->drafts());

  // A checkpoint without the layer, whose config.json says that there is one.
  const fixtures::TempDir stripped;
  auto tensors = Tensors("tiny-deepseek-mtp-fp8");
  const std::string lost = "model.layers.3.mlp.experts.2.up_proj.weight_scale_inv";
  CHECK(std::erase_if(tensors, [&](const RawTensor& t) { return t.name == lost; }) == 1);
  REQUIRE(fixtures::WriteSafetensors(stripped.File("model.safetensors"), tensors).ok());
  const std::string config = fixtures::SourceDir("tiny-deepseek-mtp-fp8") + "/config.json";
  REQUIRE(
      fixtures::WriteFile(stripped.File("config.json"), fixtures::ReadFile(config).value()).ok());
  const auto refused = load(stripped.path(), DraftLayer::kRequired);
  CHECK(absl::IsInvalidArgument(refused.status()));
  for (const std::string& word :
       {std::string("speculation: mtp needs the tensors"), lost, std::string("is missing")}) {
    CHECK(absl::StrContains(refused.status().message(), word));
  }
  CHECK_FALSE(OrFail(load(stripped.path(), DraftLayer::kIfThere))->drafts());
  CHECK(load(stripped.path(), DraftLayer::kNone).ok());
}

TEST_CASE("fp8 dummies are e4m3 of one scale, the same by any door") {
  const ModelConfig config = LoadModelConfig(fixtures::SourceDir(kFp8Model)).value();
  const auto dummy = DummyWeights(config);
  CHECK(dummy->IsFp8(kMatrix));
  CHECK_FALSE(dummy->IsFp8("lm_head.weight"));
  const kernels::WeightFormula formula = dummy->Formula(kMatrix).value();
  const auto view = dummy->Matrix(kMatrix, 576, 192);
  REQUIRE(view.ok());
  REQUIRE(view->fp8() != nullptr);
  CHECK(view->scales() == std::vector<float>(10, kernels::FormulaScale(formula)));
  std::vector<uint16_t> window(32);
  REQUIRE(dummy->ReadBFloat16(kMatrix, {576, 192}, 1000, absl::MakeSpan(window)).ok());
  for (size_t i = 0; i < window.size(); ++i) {
    CHECK(view->fp8()[1000 + i] == kernels::FormulaE4M3(formula, 1000 + i));
    CHECK(BFloat16ToFloat(window[i]) == kernels::E4M3ToFloat(view->fp8()[1000 + i]));
  }
}

TEST_CASE("the fingerprint tells latent models and their settings apart") {
  const auto of = [](const std::string& name) {
    const ModelConfig config = LoadModelConfig(fixtures::SourceDir(name)).value();
    auto source = OpenCheckpoint(fixtures::ModelDir(name), config);
    REQUIRE(source.ok());
    return Fingerprint(config, **source).value();
  };
  CHECK(of(kBFloat16Model) != of(kFp8Model));
  CHECK(of(kFp8Model) == of(kFp8Model));
  const ModelConfig base = LoadModelConfig(fixtures::SourceDir(kBFloat16Model)).value();
  const auto changed = [&](const std::function<void(LatentConfig&)>& change) {
    ModelConfig config = base;
    change(*config.latent);
    return Fingerprint(config, *DummyWeights(config)).value();
  };
  const std::string same = changed([](LatentConfig&) {});
  CHECK(same == of(kBFloat16Model));  // the fixtures are the dummies
  CHECK(changed([](LatentConfig& l) { l.softmax_scale *= 2; }) != same);
  CHECK(changed([](LatentConfig& l) { l.indexer->top_k = 32; }) != same);
  CHECK(changed([](LatentConfig& l) { l.experts.top_groups = 1; }) != same);
  CHECK(changed([](LatentConfig& l) { l.experts.scaling = 1; }) != same);
  CHECK(changed([](LatentConfig& l) { l.experts.normalise = false; }) != same);
  CHECK(changed([](LatentConfig& l) { l.next_token_layers = 1; }) == same);
}

}  // namespace
}  // namespace sluice
