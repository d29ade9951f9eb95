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
using testing::Cosine;
using testing::Dictate;
using testing::LongestCase;
using testing::RelativeError;
using testing::Teacher;

void Recall(PolicyOptions& options, bool fetch_all) {
  options.name = "recall";
  options.dense_layers = 0;
  options.recall.margin = std::numeric_limits<float>::infinity();
  options.recall.fetch_all = fetch_all;
}

void CheckExact(const std::string& kernels, DType kv_dtype, double tolerance, bool fetch_all) {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name << " on " << kernels);
    const fixtures::GoldenCase golden = LongestCase(name);
    Teacher full(fixtures::ModelDir(name), kernels, kv_dtype);
    Teacher recall(fixtures::ModelDir(name), kernels, kv_dtype, [&](PolicyOptions& options) {
      Recall(options, fetch_all);
      options.budget_tokens = options.max_context;
    });
    size_t step = 0;
    double worst = 0;
    Dictate(golden, full, recall, [&](const auto& want, const auto& got) {
      const double error = RelativeError(got, want);
      worst = std::max(worst, error);
      CHECK(error <= tolerance);
      // The tokens are the same ones, but where two are as good.
      ++step;
      const bool close = step < golden.margin.size() && golden.margin[step] <= 0.05f;
      if (!close) CHECK(Best(got) == Best(want));
    });
    for (const PolicyStatistics::Layer& layer : recall.policy().Statistics().layers) {
      CHECK(layer.recalled == layer.missing);
      // All but the ring is fetched; or what has left it, once.
      CHECK((fetch_all ? layer.HitRate() < 0.5 : layer.HitRate() > 0.9));
    }
    std::printf("%s on %s: worst relative error of logits against full %.2g\n", name.c_str(),
                kernels.c_str(), worst);
  }
}

}  // namespace

TEST_CASE("recall with a budget of the whole context gives the logits and tokens of full") {
  CheckExact("reference", DType::kFloat32, 1e-5, false);
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    const std::string path = table->name;
    if (path == "reference") continue;
    // Activations rounded to bf16 round anew whatever differs in a last bit.
    const bool rounds = table->activation_type == DType::kBFloat16;
    CheckExact(path, DType::kBFloat16, rounds ? 2e-2 : 1e-3, false);
  }
}

TEST_CASE("fetching everything in each step gives the logits and tokens of full") {
  CheckExact("portable", DType::kBFloat16, 1e-3, true);
}

// The mean cosine of logits with those of full, a half of the prompt's tokens being selected by
// `rank` columns of their keys.
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

// Random weights: attention is spread over many tokens, and half of them are not all that count.
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
