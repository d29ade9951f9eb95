// Policy `scout` on the tiny models, against `full`.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/attention/policies/scout/scout_policy.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/against_full.h"
#include "tests/parity/teacher.h"

namespace sluice {
namespace {

using testing::Best;
using testing::Cosine;
using testing::Dictate;
using testing::RelativeError;
using testing::Teacher;

constexpr int kBlockTokens = 32;
constexpr int kRing = 2;  // blocks

// Half of the prompt's blocks in HBM for good, the others the CPU's, everything selected.
void Covered(PolicyOptions& options, int prompt) {
  const int blocks = (prompt + kBlockTokens - 1) / kBlockTokens;
  options.name = "scout";
  options.dense_layers = 0;
  options.budget_tokens = options.max_context;
  options.workers = 2;
  options.worker_deadline = absl::Seconds(60);  // a busy machine is no fault
  options.scout.recall = false;
  options.scout.resident_tokens = std::max(blocks / 2 - kRing, 1) * kBlockTokens;
}

// Both sides' lse of every layer are finite: neither is empty.
void CheckBothSides(Teacher& teacher) {
  auto& scout = dynamic_cast<ScoutPolicy&>(teacher.policy());
  for (int layer = 0; layer < teacher.config().layers; ++layer) {
    const auto heads = static_cast<size_t>(teacher.config().heads);
    for (const float lse : teacher.Read(scout.parts_lse(layer), 2 * heads)) {
      CHECK(std::isfinite(lse));
    }
  }
}

void CheckExact(const std::string& kernels, DType kv_dtype, double tolerance) {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name << " on " << kernels);
    const fixtures::GoldenCase golden = testing::LongestCase(name);
    Teacher full(fixtures::ModelDir(name), kernels, kv_dtype);
    Teacher scout(fixtures::ModelDir(name), kernels, kv_dtype, [&](PolicyOptions& options) {
      Covered(options, static_cast<int>(golden.prompt.size()));
      options.scout.layer_ahead = false;
    });
    size_t step = 0;
    double worst = 0;
    Dictate(golden, full, scout, [&](const auto& want, const auto& got) {
      const double error = RelativeError(got, want);
      worst = std::max(worst, error);
      CHECK(error <= tolerance);
      // The tokens are the same ones, but where two are as good.
      ++step;
      const bool close = step < golden.margin.size() && golden.margin[step] <= 0.05f;
      if (!close) CHECK(Best(got) == Best(want));
      CheckBothSides(scout);
    });
    for (const PolicyStatistics::Layer& layer : scout.policy().Statistics().layers) {
      CHECK(layer.HitRate() > 0.25);
      CHECK(layer.HitRate() < 0.75);
    }
    std::printf("%s on %s: worst relative error of logits against full %.2g\n", name.c_str(),
                kernels.c_str(), worst);
  }
}

TEST_CASE("half of the blocks in HBM, the rest on the CPU: logits and tokens are those of full") {
  CheckExact("reference", DType::kFloat32, 1e-5);
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    const std::string path = table->name;
    if (path == "reference") continue;
    // Activations rounded to bf16 round anew whatever differs in a last bit.
    const bool rounds = table->activation_type == DType::kBFloat16;
    CheckExact(path, DType::kBFloat16, rounds ? 2e-2 : 1e-3);
  }
}

// Random weights: a layer's input says less about the next layer's queries than in a model that was
// trained, so this bounds from below how close a prediction comes.
TEST_CASE("with predicted queries the logits stay close to those of full") {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name);
    const fixtures::GoldenCase golden = testing::LongestCase(name);
    Teacher full(fixtures::ModelDir(name), "portable", DType::kBFloat16);
    Teacher scout(
        fixtures::ModelDir(name), "portable", DType::kBFloat16,
        [&](PolicyOptions& options) { Covered(options, static_cast<int>(golden.prompt.size())); });
    double worst = 1, sum = 0;
    int same = 0, steps = 0;
    Dictate(golden, full, scout, [&](const auto& want, const auto& got) {
      const double cosine = Cosine(got, want);
      worst = std::min(worst, cosine);
      sum += cosine;
      same += Best(got) == Best(want) ? 1 : 0;
      ++steps;
    });
    std::printf("%s: cosine of logits with full %.4f mean, %.4f worst; %d of %d tokens the same\n",
                name.c_str(), sum / steps, worst, same, steps);
    CHECK(worst >= 0.9);
  }
}

}  // namespace
}  // namespace sluice
