// Policy `recall` on the tiny models, against `full`.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/against_full.h"

namespace sluice {
namespace {

using testing::Best;
using testing::CheckSameAsFull;
using testing::CheckSameAsFullOnEveryPath;
using testing::CheckSameAsFullOnGpu;
using testing::Cosine;
using testing::Dictate;
using testing::LongestCase;
using testing::SameAsFull;
using testing::Teacher;

void Recall(PolicyOptions& options, bool fetch_all) {
  options.name = "recall";
  options.dense_layers = 0;
  options.recall.margin = std::numeric_limits<float>::infinity();
  options.recall.fetch_all = fetch_all;
}

SameAsFull WholeContext(bool fetch_all) {
  SameAsFull check;
  check.options = [fetch_all](PolicyOptions& options, int) {
    Recall(options, fetch_all);
    options.budget_tokens = options.max_context;
  };
  check.layer = [fetch_all](const PolicyStatistics::Layer& layer) {
    CHECK(layer.recalled == layer.missing);
    // Everything but the ring is fetched; or what has left it, once.
    CHECK((fetch_all ? layer.HitRate() < 0.5 : layer.HitRate() > 0.9));
  };
  return check;
}

}  // namespace

TEST_CASE("recall with a budget of the whole context gives the logits and tokens of full") {
  CheckSameAsFullOnEveryPath(WholeContext(false));
}

TEST_CASE("fetching everything in each step gives the logits and tokens of full") {
  CheckSameAsFull("portable", DType::kBFloat16, 1e-3, WholeContext(true));
}

TEST_CASE("recall with a budget of the whole context gives the logits and tokens of full (cuda)",
          "[cuda]") {
  for (const bool fetch_all : {false, true}) CheckSameAsFullOnGpu(WholeContext(fetch_all));
}

// Returns the mean cosine of logits with those of full, where half of the prompt's tokens are
// selected by `rank` columns of their keys.
double HalfOfTheTokens(const std::string& name, int rank) {
  const fixtures::GoldenCase golden = LongestCase(name);
  Teacher full(fixtures::ModelDir(name), "portable", DType::kBFloat16);
  Teacher recall(fixtures::ModelDir(name), "portable", DType::kBFloat16,
                 [&](PolicyOptions& options) {
                   Recall(options, false);
                   options.recall.rank = rank;
                   options.budget_tokens = static_cast<int>(golden.prompt.size() / 2);
                 });
  double worst = 1, sum = 0;
  int same = 0, steps = 0;
  Dictate(golden, full, recall, [&](const auto& want, const auto& got) {
    const double cosine = Cosine(got, want);
    worst = std::min(worst, cosine);
    sum += cosine;
    same += Best(got) == Best(want) ? 1 : 0;
    ++steps;
  });
  for (const PolicyStatistics::Layer& layer : recall.policy().Statistics().layers) {
    CHECK(layer.missing > 0);
    CHECK(layer.recalled == layer.missing);
  }
  std::printf("%s, rank %d: cosine of logits with full %.4f mean, %.4f worst; %d of %d the same\n",
              name.c_str(), rank, sum / steps, worst, same, steps);
  return sum / steps;
}

// With random weights attention is spread over many tokens, and half of them are not all that
// count.
TEST_CASE("with half of the tokens the logits come closer to those of full the more a key says") {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name);
    Teacher teacher(fixtures::ModelDir(name), "portable", DType::kBFloat16);
    const int head_dim = teacher.config().head_dim;
    const double whole = HalfOfTheTokens(name, head_dim);
    CHECK(whole >= 0.85);
    CHECK(HalfOfTheTokens(name, head_dim / 4) < whole);
  }
}

}  // namespace sluice
