// Every kernel path on the tiny models with latent caches, held to transformers' logits, tokens and
// selections, and in the packed form of caches to the float64 reference fed the same caches.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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

// Of two lists of positions, the share of `want` (up to a -1) that `got` has.
double Recall(const std::vector<int32_t>& got, const int32_t* want, size_t capacity) {
  const int32_t* end = std::find(want, want + capacity, -1);
  int found = 0;
  for (const int32_t* p = want; p != end; ++p) {
    found += std::binary_search(got.begin(), got.end(), *p) ? 1 : 0;
  }
  return static_cast<double>(found) / static_cast<double>(end - want);
}

struct Outcome {
  double worst = 0;      // step's difference
  double recall = 0;     // of all steps and layers
  int other_tokens = 0;  // steps whose best token is another, with a margin above kNearTie
  static constexpr float kNearTie = 0.05f;
};

enum class From { kTokens, kGoldenCaches };

// Forces the golden tokens; the prompt is computed in chunks, or its caches are the golden ones, of
// which the last position is computed again.
Outcome Force(LatentTeacher& teacher, const GoldenCase& golden, From from) {
  const int prompt = static_cast<int>(golden.prompt.size());
  const size_t vocab = golden.logits.size() / golden.tokens.size();
  teacher.Begin(Joined(golden));
  std::vector<float> logits;
  if (from == From::kGoldenCaches) {
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
    for (size_t layer = 0; layer < golden.selected.size(); ++layer, ++lists) {
      const size_t capacity = golden.selected[layer].size() / golden.tokens.size();
      out.recall += Recall(teacher.Selected(static_cast<int>(layer)),
                           &golden.selected[layer][step * capacity], capacity);
    }
    logits = teacher.Step(prompt + static_cast<int>(step), 1, /*generates=*/true);
  }
  out.recall /= lists;
  return out;
}

TEST_CASE("latent models on reference kernels with float32 caches match transformers to 1e-3") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    LatentTeacher teacher(fixtures::ModelDir(name), "reference", DType::kFloat32);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome out = Force(teacher, golden[c], From::kTokens);
      INFO(name << " case " << c << ": worst " << out.worst << ", recall " << out.recall);
      CHECK(out.worst <= 1e-3);
      CHECK(out.other_tokens == 0);
      CHECK(out.recall >= 0.999);
      // The golden caches are bf16.
      const Outcome cached = Force(teacher, golden[c], From::kGoldenCaches);
      INFO("from caches: worst " << cached.worst << ", recall " << cached.recall);
      CHECK(cached.worst <= 0.009);
      CHECK(cached.other_tokens == 0);
    }
  }
}

}  // namespace
}  // namespace sluice
