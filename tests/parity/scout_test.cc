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
#include "tests/parity/parity_support.h"
#include "tests/parity/teacher.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::Best;
using testing::CheckSameAsFullOnEveryPath;
using testing::CheckSameAsFullOnGpu;
using testing::Cosine;
using testing::Dictate;
using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using testing::Teacher;

constexpr int kBlockTokens = 32;
constexpr int kRing = 2;  // Blocks.

// Half of the prompt's blocks stay in HBM, the CPU has the others, and everything is selected.
void Covered(PolicyOptions& options, int prompt) {
  const int blocks = (prompt + kBlockTokens - 1) / kBlockTokens;
  options.name = "scout";
  options.dense_layers = 0;
  options.budget_tokens = options.max_context;
  options.workers = 2;
  options.worker_deadline = absl::Seconds(60);  // A busy machine is no fault.
  options.scout.recall = false;
  options.scout.resident_tokens = std::max(blocks / 2 - kRing, 1) * kBlockTokens;
}

// Checks that both sides' LSE are finite in every layer, so neither side is empty.
void CheckBothSides(Teacher& teacher) {
  auto& scout = dynamic_cast<ScoutPolicy&>(teacher.policy());
  for (int layer = 0; layer < teacher.config().layers; ++layer) {
    const auto heads = static_cast<size_t>(teacher.config().heads);
    for (const float lse : teacher.Read(scout.parts_lse(layer), 2 * heads)) {
      CHECK(std::isfinite(lse));
    }
  }
}

void HalfHits(const PolicyStatistics::Layer& layer) {
  CHECK(layer.HitRate() > 0.25);
  CHECK(layer.HitRate() < 0.75);
}

testing::SameAsFull Half() {
  return {[](PolicyOptions& options, int prompt) {
            Covered(options, prompt);
            options.scout.layer_ahead = false;
          },
          CheckBothSides, HalfHits};
}

TEST_CASE("half of the blocks in HBM, the rest on the CPU: logits and tokens are those of full") {
  CheckSameAsFullOnEveryPath(Half());
}

TEST_CASE(
    "half of the blocks in HBM, the rest on the CPU: logits and tokens are those of full (cuda)",
    "[cuda]") {
  CheckSameAsFullOnGpu(Half());
}

// With random weights a layer's input says less about the next layer's queries than in a trained
// model, so this bounds from below how close a prediction comes.
void CheckPredicted(const std::string& kernels) {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name);
    const fixtures::GoldenCase golden = testing::LongestCase(name);
    Teacher full(fixtures::ModelDir(name), kernels, DType::kBFloat16);
    Teacher scout(fixtures::ModelDir(name), kernels, DType::kBFloat16, [&](PolicyOptions& options) {
      Covered(options, static_cast<int>(golden.prompt.size()));
    });
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

TEST_CASE("with predicted queries the logits stay close to those of full") {
  CheckPredicted("portable");
}

TEST_CASE("with predicted queries the logits stay close to those of full (cuda)", "[cuda]") {
  if (testing::HasPath("cuda")) CheckPredicted("cuda");
}

// Nothing of a sequence that waits for memory is moved out: promises are firm.
void CheckWaiting(const std::string& kernels) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.kernels = kernels;
  options.max_context = 512;
  options.max_sequences = 6;
  options.chunk_tokens = 48;
  options.row_bucket = 4;
  options.policy.name = "scout";
  options.policy.budget_tokens = 96;
  options.policy.dense_layers = 0;
  options.policy.workers = 2;
  options.policy.worker_deadline = absl::Seconds(60);  // A busy machine is no fault.
  std::vector<Request> requests;
  for (int i = 0; i < 9; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 30 + i * 29; ++t) prompt.push_back(3 + (t * 7919 + i * 104729) % 500);
    requests.push_back(GreedyRequest(prompt, static_cast<uint32_t>(12 + 5 * (i % 3))));
  }
  std::vector<Generated> alone;
  {
    Node node(options);
    for (const Request& request : requests) alone.push_back(node.Generate(request));
    const int64_t tokens = node.policy().FootprintOf(0, 300).hbm_tokens.most();
    options.hbm_bytes = node.model().cache_layout().BytesFor(tokens) * 5 / 2;
  }
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  for (size_t i = 0; i < streams.size(); ++i) {
    INFO("sequence " << i);
    const Generated got = Node::Collect(*streams[i]);
    CHECK(got.finish.status.ok());
    CHECK(got.ids == alone[i].ids);
  }
  CHECK(node.Quiescent());
}

TEST_CASE("sequences for which HBM has no room wait, and give what each gives alone") {
  CheckWaiting("portable");
}

TEST_CASE("sequences for which HBM has no room wait, and give what each gives alone (cuda)",
          "[cuda]") {
  if (testing::HasPath("cuda")) CheckWaiting("cuda");
}

}  // namespace
}  // namespace sluice
