// Every kernel path on the tiny models with latent caches, held to transformers' logits, tokens and
// selections, and in the packed form of caches to the float64 reference fed the same caches.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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
  double worst = 0;      // step's difference
  double recall = 0;     // of all steps and layers
  int other_tokens = 0;  // steps whose best token is another, with a margin above kNearTie
  static constexpr float kNearTie = 0.05f;
};

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
    out.worst = std::max(out.worst, Difference(logits, want));
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    if (best != golden.tokens[step] && golden.margin[step] > Outcome::kNearTie) ++out.other_tokens;
    const auto selected = GoldenSelection(golden, step);
    for (size_t layer = 0; layer < selected.size(); ++layer, ++lists) {
      out.recall += Recall(teacher.Selected(static_cast<int>(layer)), selected[layer]);
    }
    force(step + 1);
    logits = teacher.Step(prompt + static_cast<int>(step), 1, /*generates=*/true);
  }
  out.recall /= lists;
  return out;
}

std::string Text(const Outcome& out) {
  return absl::StrCat("worst step ", out.worst, ", recall ", out.recall, ", other tokens ",
                      out.other_tokens);
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
        // One step of this model meets 0.216, the others of all cases stay below 0.15.
        CHECK(out.worst <= (name == "tiny-deepseek-v32-fp8" && c == 0 ? 0.25 : 0.15));
        CHECK(out.recall == 1.0);
      }
    }
  }
}

TEST_CASE("padded rows of a latent model change nothing") {
  const std::string name = "tiny-deepseek-v32";
  const GoldenCase golden = Golden(name)[1];
  const int prompt = static_cast<int>(golden.prompt.size());
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    if (table->sparse_mla == nullptr) continue;
    for (const DType type : {DType::kFloat8E4M3, DType::kBFloat16}) {
      INFO(table->name << ", " << DTypeName(type));
      LatentTeacher teacher(fixtures::ModelDir(name), table->name, type);
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
}

}  // namespace
}  // namespace sluice
