// Policy `hgca` on the tiny models, against `full`.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/attention/policies/hgca/hgca_policy.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/against_full.h"
#include "tests/parity/teacher.h"

namespace sluice {
namespace {

using testing::Best;
using testing::CheckSameAsFullOnEveryPath;
using testing::CheckSameAsFullOnGpu;
using testing::Cosine;
using testing::Dictate;
using testing::Teacher;

constexpr int kBlockTokens = 32;

// The window has half of the prompt's blocks, and the CPU has the others.
void HalfWindow(PolicyOptions& options, int prompt, float beta) {
  options.name = "hgca";
  options.dense_layers = 0;
  options.workers = 2;
  options.worker_deadline = absl::Seconds(60);  // A busy machine is no fault.
  options.hgca.window_tokens = std::max(prompt / kBlockTokens / 2, 1) * kBlockTokens;
  options.hgca.beta = beta;
  options.hgca.following = 0;
}

// Checks that both sides' LSE are finite in every layer, so neither side is empty.
void CheckBothSides(Teacher& teacher) {
  auto& hgca = dynamic_cast<HgcaPolicy&>(teacher.policy());
  for (int layer = 0; layer < teacher.config().layers; ++layer) {
    const auto heads = static_cast<size_t>(teacher.config().heads);
    for (const float lse : teacher.Read(hgca.parts_lse(layer), 2 * heads)) {
      CHECK(std::isfinite(lse));
    }
  }
}

void HalfHits(const PolicyStatistics::Layer& layer) {
  CHECK(layer.HitRate() > 0.25);
  CHECK(layer.HitRate() < 0.75);
}

testing::SameAsFull BetaZero() {
  return {[](PolicyOptions& options, int prompt) { HalfWindow(options, prompt, 0); },
          CheckBothSides, HalfHits};
}

TEST_CASE("beta 0, half of the blocks in the window: logits and tokens are those of full") {
  CheckSameAsFullOnEveryPath(BetaZero());
}

TEST_CASE("beta 0, half of the blocks in the window: logits and tokens are those of full (cuda)",
          "[cuda]") {
  CheckSameAsFullOnGpu(BetaZero());
}

// Random weights spread attention wide and turn it elsewhere with every token, which is hard on a
// threshold: these are bounds from below.
TEST_CASE(
    "the smaller beta, the more is selected and the closer the logits come to those of full") {
  for (const std::string& name : fixtures::TinyModels()) {
    const fixtures::GoldenCase golden = testing::LongestCase(name);
    double more = 2, closer = -1;
    for (const float beta : {0.5f, 1.0f, 2.0f}) {
      INFO(name << " beta " << beta);
      Teacher full(fixtures::ModelDir(name), "portable", DType::kBFloat16);
      Teacher hgca(fixtures::ModelDir(name), "portable", DType::kBFloat16,
                   [&](PolicyOptions& options) {
                     HalfWindow(options, static_cast<int>(golden.prompt.size()), beta);
                   });
      double sum = 0;
      int same = 0, steps = 0;
      Dictate(golden, full, hgca, [&](const auto& want, const auto& got) {
        sum += 1 - Cosine(got, want);
        same += Best(got) == Best(want) ? 1 : 0;
        ++steps;
      });
      double selected = 0, judged = 0;
      const ContextualCache& cache = dynamic_cast<HgcaPolicy&>(hgca.policy()).contextual_cache();
      for (int layer = 0; layer < hgca.config().layers; ++layer) {
        for (int head = 0; head < hgca.config().kv_heads; ++head) {
          selected += static_cast<double>(cache.SelectedTokens(0, layer, head));
          judged += static_cast<double>(cache.JudgedTokens(0, layer, head));
        }
      }
      std::printf(
          "%s, beta %.2g: 1 - cosine of logits with full %.2g; %d of %d tokens the same; "
          "%.0f %% of the tokens outside selected\n",
          name.c_str(), double{beta}, sum / steps, same, steps, 100 * selected / judged);
      CHECK(selected / judged < more);
      CHECK(sum / steps > closer);
      more = selected / judged;
      closer = sum / steps;
      if (beta < 1) CHECK(sum / steps < 0.01);
    }
  }
}

}  // namespace
}  // namespace sluice
