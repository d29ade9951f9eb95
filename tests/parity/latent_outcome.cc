#include "tests/parity/latent_outcome.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace sluice::testing {

std::vector<fixtures::GoldenCase> Golden(const std::string& name) {
  auto golden = fixtures::LoadGolden(name);
  REQUIRE(golden.ok());
  REQUIRE(golden->size() == 3);
  return *std::move(golden);
}

std::vector<int32_t> Joined(const fixtures::GoldenCase& golden) {
  std::vector<int32_t> tokens = golden.prompt;
  tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.end());
  return tokens;
}

double Difference(const std::vector<float>& got, const float* want) {
  double error = 0, want2 = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    want2 += double{want[i]} * want[i];
  }
  return std::sqrt(error / want2);
}

double Recall(const std::vector<int32_t>& got, const std::vector<int32_t>& want) {
  std::vector<int32_t> both;
  std::set_intersection(got.begin(), got.end(), want.begin(), want.end(), std::back_inserter(both));
  return static_cast<double>(both.size()) / static_cast<double>(want.size());
}

void Summarise(Outcome* out) {
  std::sort(out->steps.begin(), out->steps.end());
  out->worst = out->steps.back();
  out->median = out->steps[out->steps.size() / 2];
}

std::string Text(const Outcome& out) {
  return absl::StrCat("worst step ", out.worst, ", median ", out.median, ", recall ", out.recall,
                      ", other tokens ", out.other_tokens, ", gap ", out.gap);
}

bool IsWide(const std::string& path) {
  return path == "portable" || path == "avx2" || path == "reference";
}
LatentBounds BoundsOf(const std::string& path, const std::string& model) {
  if (!IsWide(path)) return {0.15, 0.04, 0.15, 0.04, 0.93, 0.05};
  if (model == "tiny-deepseek-v32") return {0.015, 0.012, 5e-3, 1e-4, 0.97, 1e-3};
  return {0.04, 0.025, 5e-3, 1e-4, 0.97, 1e-3};
}

}  // namespace sluice::testing
