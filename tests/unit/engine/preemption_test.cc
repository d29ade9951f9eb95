// Tests overcommitted HBM: sequences leave for DRAM and come back, and their tokens stay the same.
#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/engine/engine.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/support/node.h"
#include "tests/test_main.h"
#include "tests/unit/engine/preemption_support.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

// Returns request number `i` of a mix of what callers may ask for.
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
    // Prompts are handed over in whole, in part, or computed here.
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

void CheckPreempted(const std::string& kernels, DType type) {
  constexpr int kCount = 9;
  constexpr uint32_t kTokens = 150;
  NodeOptions roomy = Options();
  roomy.kernels = kernels;
  roomy.kv_dtype = type;
  // A prompt that is computed here would else begin with blocks that were handed over, which have
  // other bits, and when it does depends on timing.
  roomy.prefix_cache = false;
  Node alone(roomy);
  const std::vector<Generated> want = RunAll(alone, kCount, kTokens);
  CHECK(alone.metrics().preemptions.Value() == 0);

  // Sequences that leave and come back are among padded rows.
  NodeOptions tight = roomy;
  tight.row_bucket = 4;
  tight.overcommit = 3;
  tight.hbm_bytes = (type == DType::kFloat32 ? 2 : 1) * 1536 * 400 + 8192;
  Node node(tight);
  std::vector<Generated> got = RunAll(node, kCount, kTokens);
  // It depends on timing which sequences have finished when another lacks a page.
  for (int again = 0; again < 9 && node.metrics().preemptions.Value() < 2; ++again) {
    got = RunAll(node, kCount, kTokens);
  }
  CHECK(node.metrics().preemptions.Value() >= 2);
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

TEST_CASE("sequences that were preempted give the same tokens and log-probabilities to the bit") {
  CheckPreempted("auto", GENERATE(DType::kBFloat16, DType::kFloat32));
}
TEST_CASE("sequences that were preempted give the same on a GPU, to the bit", "[cuda]") {
  if (const auto status = testing::TestDevice("cuda").status(); !status.ok()) {
    return SkipTest(std::string(status.message()));
  }
  CheckPreempted("cuda", DType::kBFloat16);
}

}  // namespace
}  // namespace sluice
