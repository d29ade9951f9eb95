// Overcommitted HBM: sequences leave for DRAM and come back, and nobody can tell from their tokens.
#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/engine/engine.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr char kModel[] = "tiny-llama";

const fixtures::GoldenCase& Golden(size_t c) {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[c];
}

NodeOptions Options(Metrics* metrics) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  options.metrics = metrics;
  return options;
}

double Preemptions(const Metrics& metrics) {
  const std::string text = metrics.Render();
  const std::string name = "\nsluice_preemptions_total ";
  const size_t at = text.find(name);
  REQUIRE(at != std::string::npos);
  return std::stod(text.substr(at + name.size()));
}

// A mix of what a caller may ask for; number `i` of them.
Request Mixed(int i, uint32_t max_tokens) {
  Request request = GreedyRequest({}, max_tokens);
  request.sampling.logprobs = 3;
  switch (i % 4) {
    case 0:
      break;
    case 1:
      request.sampling.temperature = 0.9f;
      request.sampling.top_p = 0.95f;
      request.sampling.seed = 1000 + i;
      break;
    case 2:
      request.sampling.temperature = 0.7f;
      request.sampling.seed = 7 + i;
      request.sampling.repetition_penalty = 1.2f;
      request.sampling.frequency_penalty = 0.3f;
      request.sampling.presence_penalty = 0.1f;
      break;
    case 3:
      request.sampling.logit_bias = {{5, 2.0f}, {9, -50.0f}};
      request.sampling.min_tokens = 20;
      request.sampling.stop_token_ids = {5};
      break;
  }
  return request;
}

std::vector<Generated> RunAll(Node& node, int count, uint32_t max_tokens) {
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < count; ++i) {
    Request request = Mixed(i, max_tokens);
    // Handed over in whole, in part, or computed here.
    const fixtures::GoldenCase& g = Golden(1);
    const auto whole = static_cast<uint32_t>(g.prompt.size());
    if (i % 3 == 2) {
      request.prompt = g.prompt;
    } else {
      request.handoff.transfer_id =
          node.Push(g.prompt, i % 3 == 0 ? whole : 20, max_tokens, g.k, g.v);
    }
    streams.push_back(node.Start(std::move(request)));
  }
  std::vector<Generated> out;
  for (const auto& stream : streams) out.push_back(Node::Collect(*stream));
  return out;
}

TEST_CASE("sequences that were preempted give the same tokens and log-probabilities to the bit") {
  const DType type = GENERATE(DType::kBFloat16, DType::kFloat32);
  constexpr int kCount = 9;
  constexpr uint32_t kTokens = 150;
  Metrics roomy_metrics, tight_metrics;
  NodeOptions roomy = Options(&roomy_metrics);
  roomy.kv_dtype = type;
  Node alone(roomy);
  const std::vector<Generated> want = RunAll(alone, kCount, kTokens);
  CHECK(Preemptions(roomy_metrics) == 0);

  NodeOptions tight = roomy;
  tight.metrics = &tight_metrics;
  tight.overcommit = 3;
  tight.hbm_bytes = (type == DType::kFloat32 ? 2 : 1) * 1536 * 400 + 8192;
  Node node(tight);
  std::vector<Generated> got = RunAll(node, kCount, kTokens);
  // Who has finished when another lacks a page is a matter of time.
  for (int again = 0; again < 9 && Preemptions(tight_metrics) < 2; ++again) {
    got = RunAll(node, kCount, kTokens);
  }
  CHECK(Preemptions(tight_metrics) >= 2);
  for (int i = 0; i < kCount; ++i) {
    INFO("sequence " << i);
    CHECK(got[i].ids == want[i].ids);
    CHECK(got[i].finish.reason == want[i].finish.reason);
    REQUIRE(got[i].tokens.size() == want[i].tokens.size());
    for (size_t t = 0; t < got[i].tokens.size(); ++t) {
      REQUIRE(got[i].tokens[t].logprob == want[i].tokens[t].logprob);
      REQUIRE(got[i].tokens[t].top_logprobs == want[i].tokens[t].top_logprobs);
    }
  }
  CHECK(node.Quiescent());
}

struct Cost {
  double seconds = 0;
  uint64_t steps = 0;
  double preemptions = 0;
};

// Of 16 sequences of a prompt of 33 and 80 tokens each.
Cost CostOf(double overcommit) {
  Metrics metrics;
  NodeOptions options = Options(&metrics);
  options.overcommit = overcommit;
  options.hbm_bytes = 1536 * 600 + 8192;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  const absl::Time begin = absl::Now();
  for (int i = 0; i < 16; ++i) streams.push_back(node.Start(GreedyRequest(Golden(1).prompt, 80)));
  for (const auto& stream : streams) CHECK(Node::Collect(*stream).ids.size() == 80);
  Cost cost;
  cost.seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  cost.preemptions = Preemptions(metrics);
  absl::Notification there;
  node.engine().Snapshot([&](const EngineSnapshot& snapshot) {
    cost.steps = snapshot.times.steps;
    there.Notify();
  });
  there.WaitForNotification();
  return cost;
}

TEST_CASE("overcommitted memory does not slow a batch down, even where every sequence is long") {
  // The worst case: nobody stops early, so that every promise is called in. Other programs on the
  // machine change the time but not the steps, so the time may be taken again.
  Cost plain = CostOf(1), twice = CostOf(2);
  for (int again = 0; again < 5 && twice.seconds > 1.5 * plain.seconds; ++again) {
    plain.seconds = std::min(plain.seconds, CostOf(1).seconds);
    twice.seconds = std::min(twice.seconds, CostOf(2).seconds);
  }
  WARN("overcommit 2 takes " << twice.steps << " steps and " << twice.seconds << " s, 1 "
                             << plain.steps << " and " << plain.seconds << "; " << twice.preemptions
                             << " preemptions");
  CHECK(plain.preemptions == 0);
  CHECK(twice.seconds <= 1.5 * plain.seconds);
  CHECK(static_cast<double>(twice.steps) <= 1.2 * static_cast<double>(plain.steps));
}

}  // namespace
}  // namespace sluice
