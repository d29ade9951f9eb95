// Tests the bench of speculation: its drafter is right as often as it is told to be, and with a
// tiny model both runs give the same tokens, in fewer steps with drafts.
#include <catch2/catch.hpp>
#include <cmath>
#include <string>

#include "src/attention/policies/full/full_policy.h"
#include "src/bench/step/known_drafter.h"
#include "src/bench/step/speculation_report.h"
#include "src/bench/step/speculation_run.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/policy_model.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/or_fail.h"

namespace sluice::bench {
namespace {

TEST_CASE("a draft is the known token as often as stated, and another token otherwise") {
  constexpr size_t kTokens = 4000;
  KnownDrafter::Options options;
  options.vocab = 7;
  options.probability = GENERATE(0.0, 0.7, 1.0);
  options.context = 1;
  options.known.assign(2, std::vector<int32_t>(kTokens, 6));
  const KnownDrafter drafter(options);
  size_t right = 0, together = 0;
  for (size_t i = 0; i < kTokens; ++i) {
    const int32_t draft = drafter.DraftAt(1, i);
    CHECK((draft == 6 || draft == 0));
    right += draft == 6 ? 1 : 0;
    together += draft == drafter.DraftAt(0, i) ? 1 : 0;
  }
  const double p = options.probability;
  CHECK(std::abs(static_cast<double>(right) / kTokens - p) < 0.03);
  // Sequences have draws of their own.
  CHECK(std::abs(static_cast<double>(together) / kTokens - (p * p + (1 - p) * (1 - p))) < 0.03);
}

TEST_CASE("drafts behind a wrong one are not judged, and none follow the known tokens") {
  KnownDrafter::Options options;
  options.vocab = 100;
  options.probability = 0;
  options.context = 2;
  options.known = {{10, 11, 12, 13}};
  KnownDrafter drafter(options);
  const std::unique_ptr<SequenceDrafter> sequence = drafter.Begin(6);
  std::vector<int32_t> drafts;
  sequence->Follow({1, 0, 10});
  CHECK(sequence->Expects());
  sequence->Propose(2, &drafts);
  CHECK(drafts == std::vector<int32_t>{12, 13});
  sequence->Follow({1, 0, 10, 11});
  sequence->Follow({1, 0, 10, 11});
  CHECK(drafter.counts().judged == 1);
  CHECK(drafter.counts().right == 0);
  sequence->Propose(3, &drafts);
  CHECK(drafts == std::vector<int32_t>{13, 14});
  // Tokens that happen to be the drafts count as right.
  sequence->Follow({1, 0, 10, 11, 13, 14, 15});
  CHECK(drafter.counts().judged == 3);
  CHECK(drafter.counts().right == 2);
  CHECK_FALSE(sequence->Expects());
  sequence->Propose(3, &drafts);
  CHECK(drafts.empty());
}

TEST_CASE("a token that differs is named") {
  CHECK(CheckSameTokens({{1, 2}, {3}}, {{1, 2}, {3}}).ok());
  const absl::Status differs = CheckSameTokens({{1, 2}, {3, 4}}, {{1, 2}, {3, 5}});
  CHECK(differs.message() == "sequence 1, output 1: token 4 without drafts, token 5 with drafts");
  const absl::Status lacks = CheckSameTokens({{1, 2}}, {{1}});
  CHECK(lacks.message() == "sequence 0, output 1: token 2 without drafts, no token with drafts");
}

TEST_CASE("drafts of a stated probability give that many tokens a step and the same tokens") {
  constexpr int kBatch = 3;
  SpeculationOptions options;
  options.run.batch = kBatch;
  options.run.context = 40;
  options.run.steps = 80;
  options.draft_tokens = 3;
  options.probability = GENERATE(0.0, 0.7, 1.0);
  // With a next-token layer its own drafts are made too, and are not those that are verified.
  options.draft_layer = GENERATE(false, true);
  const int total = options.run.context + EngineTokens(options.run);
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice({"auto", 1}));
  Model::Options model_options;
  model_options.directory =
      fixtures::SourceDir(options.draft_layer ? "tiny-deepseek-mtp" : "tiny-llama");
  if (options.draft_layer) model_options.draft_layer = Model::Options::DraftLayer::kRequired;
  model_options.load_format = "dummy";
  model_options.max_context = total;
  model_options.max_rows = 512;
  model_options.max_logits = kBatch * (1 + options.draft_tokens);
  const std::unique_ptr<Model> model = OrFail(Model::Load(model_options, device.get()));
  const auto bytes = static_cast<size_t>(kBatch * (model->cache_layout().BytesFor(total) + 4096));
  const auto hbm = OrFail(
      PagePool::Create("hbm", model->cache_layout(),
                       OrFail(device->Allocate(MemoryKind::kDevice, bytes + 8192, "caches"))));
  PolicyOptions shape = PolicyOver(device.get(), hbm.get(), kBatch, total);
  DescribeModel(*model, &shape);
  const auto policy = OrFail(NewFullPolicy(shape));
  const SpeculationResult result =
      OrFail(RunSpeculation(options, kBatch, device.get(), model.get(), hbm.get(), policy.get()));
  const double p = options.probability;
  REQUIRE(result.plain.outputs.size() == kBatch);
  CHECK(result.plain.outputs[0].size() == static_cast<size_t>(total - options.run.context));
  CHECK(result.plain.outputs == result.drafted.outputs);
  CHECK(result.plain.outputs[0] != result.plain.outputs[1]);
  CHECK(std::abs(result.plain.tokens_per_step - 1) < 0.05);
  CHECK(std::abs(result.drafted.tokens_per_step - ExpectedTokensPerStep(3, p)) < 0.25);
  CHECK(std::abs(result.acceptance - p) < 0.08);
  const std::vector<Figure> figures = SpeculationFigures(options, result);
  REQUIRE(figures.size() == 2);
  CHECK(figures[0].name == "speculation, batch 3, context 40, without drafts");
  CHECK(figures[1].name.find("by stated probability") != std::string::npos);
}

}  // namespace
}  // namespace sluice::bench
