// Every kernel path on the tiny models with latent caches, held to transformers' logits, tokens and
// selections, and in the packed form of caches to the float64 reference fed the same caches.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/kernel_table.h"
#include "src/base/dtype.h"
#include "src/model/checkpoint.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/latent_teacher.h"
#include "tests/parity/parity_support.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using fixtures::GoldenCase;
using testing::HasPath;
using testing::LatentTeacher;

// Case 2 alone has more tokens than are selected.
constexpr size_t kSelectiveCase = 2;

std::vector<GoldenCase> Golden(const std::string& name) {
  auto golden = fixtures::LoadGolden(name);
  REQUIRE(golden.ok());
  REQUIRE(golden->size() == 3);
  return *std::move(golden);
}

std::vector<int32_t> Joined(const GoldenCase& golden) {
  std::vector<int32_t> tokens = golden.prompt;
  tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.end());
  return tokens;
}

// Relative L2.
double Difference(const std::vector<float>& got, const float* want) {
  double error = 0, want2 = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    want2 += double{want[i]} * want[i];
  }
  return std::sqrt(error / want2);
}

// The share of `want` that `got` has; both ascending.
double Recall(const std::vector<int32_t>& got, const std::vector<int32_t>& want) {
  std::vector<int32_t> both;
  std::set_intersection(got.begin(), got.end(), want.begin(), want.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(want.size());
}

struct Outcome {
  std::vector<double> steps;  // the logits' differences
  double worst = 0;
  double median = 0;
  double recall = 0;     // of all steps and layers
  int other_tokens = 0;  // steps whose best token is another, with a margin above kNearTie
  static constexpr float kNearTie = 0.05f;
};

void Summarise(Outcome* out) {
  std::sort(out->steps.begin(), out->steps.end());
  out->worst = out->steps.back();
  out->median = out->steps[out->steps.size() / 2];
}

enum class From { kTokens, kGoldenCaches, kGoldenCachesAndSelections };

// What the golden step attended to that made row `step` of the logits, by layer.
std::vector<std::vector<int32_t>> GoldenSelection(const GoldenCase& golden, size_t step) {
  std::vector<std::vector<int32_t>> out;
  for (const std::vector<int32_t>& all : golden.selected) {
    const size_t capacity = all.size() / golden.tokens.size();
    const auto begin = all.begin() + static_cast<ptrdiff_t>(step * capacity);
    out.emplace_back(begin, std::find(begin, begin + static_cast<ptrdiff_t>(capacity), -1));
  }
  return out;
}

// Forces the golden tokens; the prompt is computed in chunks, or its caches are the golden ones, of
// which the last position is computed again.
Outcome Force(LatentTeacher& teacher, const GoldenCase& golden, From from) {
  const int prompt = static_cast<int>(golden.prompt.size());
  const size_t vocab = golden.logits.size() / golden.tokens.size();
  const auto force = [&](size_t step) {
    const bool forced = from == From::kGoldenCachesAndSelections && step < golden.tokens.size();
    teacher.ForceSelection(forced ? GoldenSelection(golden, step)
                                  : std::vector<std::vector<int32_t>>{});
  };
  teacher.Begin(Joined(golden));
  force(0);
  std::vector<float> logits;
  if (from != From::kTokens) {
    teacher.SetGolden(golden);
    logits = teacher.Step(prompt - 1, 1, /*generates=*/false);
  } else {
    constexpr int kChunk = 75;  // no multiple of a block
    for (int at = 0; at < prompt; at += kChunk) {
      logits = teacher.Step(at, std::min(kChunk, prompt - at), /*generates=*/false);
    }
  }
  Outcome out;
  int lists = 0;
  for (size_t step = 0; step < golden.tokens.size(); ++step) {
    const float* want = &golden.logits[step * vocab];
    out.steps.push_back(Difference(logits, want));
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    if (best != golden.tokens[step] && golden.margin[step] > Outcome::kNearTie) ++out.other_tokens;
    const auto selected = GoldenSelection(golden, step);
    for (size_t layer = 0; layer < selected.size(); ++layer, ++lists) {
      out.recall += Recall(teacher.Selected(static_cast<int>(layer)), selected[layer]);
    }
    force(step + 1);
    logits = teacher.Step(prompt + static_cast<int>(step), 1, /*generates=*/true);
  }
  out.recall /= std::max(lists, 1);
  Summarise(&out);
  return out;
}

std::string Text(const Outcome& out) {
  return absl::StrCat("worst step ", out.worst, ", median ", out.median, ", recall ", out.recall,
                      ", other tokens ", out.other_tokens);
}

TEST_CASE("latent models on reference kernels with float32 caches match transformers to 1e-3") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    LatentTeacher teacher(fixtures::ModelDir(name), "reference", DType::kFloat32);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome out = Force(teacher, golden[c], From::kTokens);
      INFO(name << " case " << c << ": " << Text(out));
      CHECK(out.worst <= 1e-3);
      CHECK(out.other_tokens == 0);
      CHECK(out.recall >= 0.999);
      // The golden caches are bf16, which alone costs that much; where they choose what is
      // attended to, a choice near the cut may fall otherwise.
      const Outcome cached = Force(teacher, golden[c], From::kGoldenCachesAndSelections);
      INFO("from caches: " << Text(cached));
      CHECK(cached.worst <= 0.009);
      CHECK(cached.other_tokens == 0);
      CHECK(Force(teacher, golden[c], From::kGoldenCaches).recall >= 0.99);
    }
  }
}

TEST_CASE("packed caches on reference kernels cost what quantising costs") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    LatentTeacher teacher(fixtures::ModelDir(name), "reference", DType::kFloat8E4M3);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome out = Force(teacher, golden[c], From::kGoldenCaches);
      INFO(name << " case " << c << ": " << Text(out));
      if (c == kSelectiveCase) {
        CHECK(out.recall >= 0.88);
      } else {
        CHECK(out.worst <= 0.15);
        CHECK(out.median <= 0.08);
        CHECK(out.recall == 1.0);
      }
    }
  }
}

void CheckPadding(const std::string& path) {
  if (!HasPath(path)) return;
  const std::string name = "tiny-deepseek-v32";
  const GoldenCase golden = Golden(name)[1];
  const int prompt = static_cast<int>(golden.prompt.size());
  for (const DType type : {DType::kFloat8E4M3, DType::kBFloat16}) {
    INFO(path << ", " << DTypeName(type));
    LatentTeacher teacher(fixtures::ModelDir(name), path, type);
    std::vector<std::vector<float>> logits;
    std::vector<std::vector<std::string>> caches;
    for (const int padding : {0, 5}) {
      teacher.Begin(Joined(golden));
      teacher.Step(0, prompt, /*generates=*/false, padding);
      logits.push_back(teacher.Step(prompt, 1, /*generates=*/true, padding));
      caches.push_back(teacher.Caches());
    }
    CHECK(logits[0] == logits[1]);
    CHECK(caches[0] == caches[1]);
  }
}

TEST_CASE("padded rows of a latent model change nothing") {
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    CheckPadding(table->name);
  }
}
TEST_CASE("padded rows of a latent model change nothing on a GPU", "[cuda]") {
  CheckPadding("cuda");
}

// How far a path may be from transformers, and from the float64 reference over the same packed
// caches. Paths with float32 activations have rounded the weights of the fp8 model to bf16, once;
// measured 0.012 (what bf16 caches cost) and 1.5e-5 on the bf16 model, 0.027 and 0.039 on the fp8
// one. The others round every activation, and on a GPU the probabilities; in a random model that
// turns over a router's choice now and then, which shows in a single step: measured medians 0.022,
// worst 0.108.
struct Bounds {
  double golden, golden_median;  // bf16 caches, golden selections
  double packed, packed_median;
  double overlap;  // of selections, mean
};
Bounds BoundsOf(const std::string& path, const std::string& model) {
  const bool wide = path == "portable" || path == "avx2" || path == "reference";
  if (!wide) return {0.15, 0.04, 0.15, 0.04, 0.93};
  if (model == "tiny-deepseek-v32") return {0.015, 0.012, 5e-3, 5e-3, 0.97};
  return {0.04, 0.025, 0.05, 0.03, 0.97};
}

void CheckAgainstGolden(const std::string& path) {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const Bounds bounds = BoundsOf(path, name);
    LatentTeacher teacher(fixtures::ModelDir(name), path, DType::kBFloat16);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome forced = Force(teacher, golden[c], From::kGoldenCachesAndSelections);
      INFO(path << ", " << name << " case " << c << ": " << Text(forced));
      CHECK(forced.worst <= bounds.golden);
      CHECK(forced.median <= bounds.golden_median);
      const Outcome own = Force(teacher, golden[c], From::kTokens);
      INFO("selections its own, prompt too: " << Text(own));
      CHECK(own.recall >= bounds.overlap);
      if (c == kSelectiveCase) continue;
      CHECK(own.worst <= bounds.golden);
      CHECK(own.median <= bounds.golden_median);
    }
  }
}

// Steps over the golden prompts' quantised caches: before each the path gets the reference's.
Outcome StepBeside(LatentTeacher& reference, LatentTeacher& teacher, const GoldenCase& golden) {
  const int prompt = static_cast<int>(golden.prompt.size());
  reference.Begin(Joined(golden));
  teacher.Begin(Joined(golden));
  reference.SetGolden(golden);
  Outcome out;
  for (size_t step = 0; step < golden.tokens.size(); ++step) {
    const int position = prompt + static_cast<int>(step);
    teacher.SetCaches(reference.Caches());
    const std::vector<float> want = reference.Step(position, 1, /*generates=*/true);
    teacher.Step(position, 1, /*generates=*/true);
    std::vector<std::vector<int32_t>> selected;
    for (int layer = 0; layer < teacher.config().layers; ++layer) {
      selected.push_back(reference.Selected(layer));
      out.recall += Recall(teacher.Selected(layer), selected.back()) /
                    static_cast<double>(golden.tokens.size()) / teacher.config().layers;
    }
    teacher.ForceSelection(selected);
    const std::vector<float> got = teacher.Step(position, 1, /*generates=*/true);
    teacher.ForceSelection({});
    out.steps.push_back(Difference(got, want.data()));
  }
  Summarise(&out);
  return out;
}

void CheckAgainstReference(const std::string& path) {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const Bounds bounds = BoundsOf(path, name);
    LatentTeacher reference(fixtures::ModelDir(name), "reference", DType::kFloat8E4M3);
    LatentTeacher teacher(fixtures::ModelDir(name), path, DType::kFloat8E4M3);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome out = StepBeside(reference, teacher, golden[c]);
      INFO(path << ", " << name << " packed, case " << c << ": " << Text(out));
      CHECK(out.worst <= bounds.packed);
      CHECK(out.median <= bounds.packed_median);
      CHECK(out.recall >= bounds.overlap);
    }
  }
}

void CheckPath(const std::string& path) {
  if (!HasPath(path)) return;
  CheckAgainstGolden(path);
  CheckAgainstReference(path);
}

TEST_CASE("latent models on portable kernels") { CheckPath("portable"); }
TEST_CASE("latent models on AVX2 kernels") { CheckPath("avx2"); }
TEST_CASE("latent models on AVX-512 BF16 kernels") { CheckPath("avx512bf16"); }
TEST_CASE("latent models on AMX kernels") { CheckPath("amx"); }
TEST_CASE("latent models on a GPU", "[cuda]") { CheckPath("cuda"); }

// Without the tensors of the indexer, and as the older family.
void WriteWithoutIndexer(const std::string& from, const std::string& to) {
  auto config = nlohmann::json::parse(fixtures::ReadFile(from + "/config.json").value());
  config["model_type"] = "deepseek_v3";
  config["architectures"] = {"DeepseekV3ForCausalLM"};
  for (const char* key : {"index_head_dim", "index_n_heads", "index_topk", "layer_types"}) {
    config.erase(key);
  }
  REQUIRE(fixtures::WriteFile(to + "/config.json", config.dump()).ok());
  const auto checkpoint = Checkpoint::Open(from);
  REQUIRE(checkpoint.ok());
  std::vector<fixtures::RawTensor> tensors;
  for (const auto& [name, entry] : checkpoint->tensors()) {
    if (absl::StrContains(name, "indexer")) continue;
    tensors.push_back({name, entry.tensor->type, entry.tensor->shape,
                       std::string(reinterpret_cast<const char*>(entry.file->Data(*entry.tensor)),
                                   entry.tensor->bytes)});
  }
  REQUIRE(fixtures::WriteSafetensors(to + "/model.safetensors", tensors).ok());
}

// Cases 0 and 1 select everything: there the indexer makes no difference.
void CheckDense(const std::string& path, DType kv_dtype) {
  if (!HasPath(path)) return;
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const fixtures::TempDir dir;
    WriteWithoutIndexer(fixtures::ModelDir(name), dir.path());
    LatentTeacher teacher(dir.path(), path, kv_dtype);
    auto golden = Golden(name);
    for (size_t c = 0; c < kSelectiveCase; ++c) {
      golden[c].selected.clear();
      const Outcome out = Force(teacher, golden[c], From::kTokens);
      INFO(path << ", " << name << " case " << c << ": " << Text(out));
      CHECK(out.worst <= (path == "reference" ? 1e-3 : BoundsOf(path, name).golden));
    }
  }
}

TEST_CASE("DeepSeek-V3 attends to everything, as V3.2 does where it selects everything") {
  CheckDense("reference", DType::kFloat32);
  for (const char* path : {"portable", "avx512bf16"}) CheckDense(path, DType::kBFloat16);
}
TEST_CASE("DeepSeek-V3 attends to everything on a GPU", "[cuda]") {
  CheckDense("cuda", DType::kBFloat16);
}

}  // namespace
}  // namespace sluice
