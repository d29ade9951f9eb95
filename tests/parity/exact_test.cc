// Exact where it fits, with whole models: random requests run together under a sparse policy and
// under full. Up to the number of tokens that the end calls exact they are the same, and their
// log-probabilities are within 1e-3; until then nothing is attended to by the CPU or fetched.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::HasPath;
using testing::Node;
using testing::NodeOptions;

// What log-probabilities may differ by, and how close the best two may be where tokens differ.
struct Close {
  double logprob;
  double margin;
};
constexpr Close kFloat32{1e-3, 2e-3};
constexpr Close kCuda{0.15, 0.15};

int Below(SplitMix64& random, int64_t end) {
  return static_cast<int>(random.Below(static_cast<uint64_t>(std::max<int64_t>(end, 1))));
}

// A node that is drawn at random.
struct Drawn {
  std::string model;
  NodeOptions options;
  int64_t limit = 0;  // tokens up to which the policy is exact
};

Drawn DrawNode(SplitMix64& random, const std::string& path, const std::string& policy) {
  Drawn drawn;
  NodeOptions& o = drawn.options;
  const std::vector<std::string>& models = fixtures::TinyModels();
  drawn.model = models[random.Below(models.size())];
  o.model_dir = fixtures::ModelDir(drawn.model);
  o.kernels = path;
  o.kv_dtype = path == "cuda" ? DType::kBFloat16 : DType::kFloat32;
  o.block_tokens = Below(random, 2) == 0 ? 16 : 32;
  o.max_context = 1024;
  o.max_sequences = 4;
  o.chunk_tokens = 1 + Below(random, 64);
  o.row_bucket = Below(random, 2) == 0 ? 0 : 3;
  o.policy.name = policy;
  o.policy.budget_tokens = (2 + Below(random, 5)) * o.block_tokens + Below(random, o.block_tokens);
  o.policy.dense_layers = Below(random, 3);
  o.policy.workers = 1 + Below(random, 2);
  o.policy.worker_deadline = absl::Seconds(60);
  o.policy.hgca.window_tokens = (2 + Below(random, 5)) * o.block_tokens;
  const int budget = o.policy.budget_tokens / o.block_tokens * o.block_tokens;
  drawn.limit = policy == "scout"    ? budget + 2 * o.block_tokens
                : policy == "recall" ? budget + o.block_tokens
                                     : o.policy.hgca.window_tokens;
  return drawn;
}

std::vector<int32_t> DrawPrompt(SplitMix64& random, int tokens) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < tokens; ++i) prompt.push_back(3 + Below(random, 480));
  return prompt;
}

Request WithLogprobs(std::vector<int32_t> prompt, int max_tokens) {
  Request request = GreedyRequest(std::move(prompt), static_cast<uint32_t>(max_tokens));
  request.sampling.logprobs = 2;
  return request;
}

// Checks the first `exact` tokens. Returns false if they part at a near tie, which is no fault.
bool CheckFirst(const Generated& got, const Generated& full, size_t exact, const Close& close) {
  REQUIRE(got.finish.status.ok());
  REQUIRE(exact <= std::min(got.tokens.size(), full.tokens.size()));
  for (size_t i = 0; i < exact; ++i) {
    INFO("token " << i << " of " << exact);
    const auto& best = full.tokens[i].top_logprobs;
    const bool tie = double{best[0].second} - double{best[1].second} <= close.margin;
    if (got.ids[i] != full.ids[i] && tie) return false;
    REQUIRE(got.ids[i] == full.ids[i]);
    CHECK(std::abs(*got.tokens[i].logprob - *full.tokens[i].logprob) <= close.logprob);
  }
  return true;
}

// Returns how many of `tokens` output tokens behind a prompt must be exact.
int64_t ExactOf(int64_t limit, int64_t prompt, int64_t tokens) {
  return std::min(tokens, std::max<int64_t>(1, limit - prompt + 1));
}

void CheckNothingMissing(Node& node, bool expected) {
  CHECK(node.Quiescent());
  int64_t missing = 0, recalled = 0;
  for (const PolicyStatistics::Layer& layer : node.policy().Statistics().layers) {
    missing += layer.missing;
    recalled += layer.recalled;
  }
  if (expected) CHECK(missing + recalled == 0);
}

// Runs requests together: those that fit to their end first, then some that outgrow the budget.
void CheckTogether(SplitMix64& random, const Drawn& drawn, const Close& close) {
  NodeOptions full_options = drawn.options;
  full_options.policy = {};
  Node node(drawn.options), full(full_options);
  REQUIRE(node.policy().exact_tokens() == drawn.limit);
  int outgrew = 0;
  for (const bool fits : {true, false}) {
    std::vector<Request> requests;
    for (int i = 0; i < 6; ++i) {
      const int tokens = 2 + Below(random, fits ? std::min<int64_t>(30, drawn.limit / 2) : 60);
      const int64_t most = fits ? drawn.limit - tokens + 1 : drawn.limit + 8;
      int prompt = Below(random, 2) == 0 ? 1 + Below(random, most)
                                         : static_cast<int>(most) - Below(random, most / 4);
      if (!fits && i == 0) prompt = static_cast<int>(drawn.limit);  // outgrows it for certain
      requests.push_back(WithLogprobs(DrawPrompt(random, prompt), tokens));
    }
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (const Request& request : requests) streams.push_back(node.Start(request));
    for (size_t i = 0; i < requests.size(); ++i) {
      INFO("request " << i << ", prompt " << requests[i].prompt.size());
      const Generated got = Node::Collect(*streams[i]);
      const Generated want = full.Generate(requests[i]);
      CHECK(want.finish.exact_tokens == want.tokens.size());
      const auto tokens = std::ssize(got.tokens);
      const int64_t exact = ExactOf(drawn.limit, std::ssize(requests[i].prompt), tokens);
      CHECK(got.finish.exact_tokens == exact);
      if (fits) CHECK(exact == tokens);
      outgrew += exact < tokens ? 1 : 0;
      CheckFirst(got, want, static_cast<size_t>(exact), close);
    }
    CheckNothingMissing(node, fits);
  }
  CHECK(outgrew > 0);
}

// A kept sequence's turns are exact until one is not; its caches are approximate from then on.
void CheckTurns(SplitMix64& random, const Drawn& drawn, const Close& close) {
  NodeOptions full_options = drawn.options;
  full_options.policy = {};
  Node node(drawn.options), full(full_options);
  const int tokens = static_cast<int>(drawn.limit / 8);
  std::vector<int32_t> all = DrawPrompt(random, 1 + Below(random, drawn.limit / 2));
  Request request = WithLogprobs(all, tokens);
  bool approximate = false;
  for (int turn = 0; turn < 4; ++turn) {
    INFO("turn " << turn << ", " << all.size() << " tokens");
    request.keep = absl::Seconds(60);
    const Generated got = node.Generate(request);
    const Generated want = full.Generate(WithLogprobs(all, tokens));
    const int64_t exact = approximate ? 0 : ExactOf(drawn.limit, std::ssize(all), tokens);
    CHECK(got.finish.exact_tokens == exact);
    approximate = exact < tokens;
    // After a tie the two texts differ, and so do all later turns.
    if (!CheckFirst(got, want, static_cast<size_t>(exact), close)) return;
    const std::vector<int32_t> appended = DrawPrompt(random, Below(random, 20));
    request = WithLogprobs(appended, tokens);
    REQUIRE_FALSE(got.finish.sequence_id.empty());
    request.handoff.sequence_id = got.finish.sequence_id;
    all.insert(all.end(), got.ids.begin(), got.ids.end());
    all.insert(all.end(), appended.begin(), appended.end());
  }
}

// Caches that came whole or in part, with and without first tokens.
void CheckHandedOver(SplitMix64& random, const Drawn& drawn, const Close& close) {
  NodeOptions full_options = drawn.options;
  full_options.policy = {};
  Node node(drawn.options), full(full_options);
  const auto golden = fixtures::LoadGolden(drawn.model);
  REQUIRE(golden.ok());
  for (const fixtures::GoldenCase& g : *golden) {
    const auto prompt = static_cast<uint32_t>(g.prompt.size());
    const auto steps = static_cast<uint32_t>(g.tokens.size());
    const uint32_t context =
        Below(random, 2) == 0 ? prompt : 1 + static_cast<uint32_t>(Below(random, prompt));
    std::vector<OutputToken> first(context == prompt ? random.Below(4) : 0);
    for (size_t i = 0; i < first.size(); ++i) first[i].id = g.tokens[i];
    const auto run = [&](Node& on) {
      Request request = WithLogprobs({}, static_cast<int>(steps));
      request.sampling.logprobs = 2;
      request.handoff.transfer_id = on.Push(g.prompt, context, steps, g.k, g.v, first);
      return on.Generate(std::move(request));
    };
    INFO("prompt " << prompt << ", " << context << " handed over, " << first.size()
                   << " first tokens");
    Generated got = run(node), want = run(full);
    const int64_t exact = std::max(ExactOf(drawn.limit, prompt, steps), std::ssize(first));
    CHECK(got.finish.exact_tokens == exact);
    // What was handed over has no log-probabilities.
    for (Generated* g_of : {&got, &want}) {
      g_of->ids.erase(g_of->ids.begin(), g_of->ids.begin() + std::ssize(first));
      g_of->tokens.erase(g_of->tokens.begin(), g_of->tokens.begin() + std::ssize(first));
    }
    CheckFirst(got, want, static_cast<size_t>(exact) - first.size(), close);
  }
}

void CheckPath(const std::string& path, const Close& close, int trials) {
  SplitMix64 random(TestSeed());
  for (const char* policy : {"scout", "recall", "hgca"}) {
    for (int trial = 0; trial < trials; ++trial) {
      const Drawn drawn = DrawNode(random, path, policy);
      INFO(policy << ", budget " << drawn.options.policy.budget_tokens << ", blocks of "
                  << drawn.options.block_tokens << ", dense layers "
                  << drawn.options.policy.dense_layers << ", " << drawn.model << ", exact up to "
                  << drawn.limit);
      CheckTogether(random, drawn, close);
      CheckTurns(random, drawn, close);
      CheckHandedOver(random, drawn, close);
    }
  }
}

TEST_CASE("while a sequence fits its budget and ring, every policy gives full's tokens") {
  CheckPath("portable", kFloat32, 3);
}

TEST_CASE("while a sequence fits its budget and ring, every policy gives full's tokens (cuda)",
          "[cuda]") {
  if (HasPath("cuda")) CheckPath("cuda", kCuda, 3);
}

// Only full preempts; what it moves out and back is exact to the end.
TEST_CASE("tokens are counted as exact after a preemption, too") {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.kernels = "portable";
  options.max_context = 512;
  options.max_sequences = 4;
  Node roomy(options);
  options.hbm_bytes = roomy.model().cache_layout().BytesFor(512) * 5 / 4;
  options.overcommit = 3;
  Node node(options);
  SplitMix64 random(TestSeed());
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 4; ++i) {
    streams.push_back(node.Start(GreedyRequest(DrawPrompt(random, 60), 150)));
  }
  for (const auto& stream : streams) CHECK(Node::Collect(*stream).finish.exact_tokens == 150);
  CHECK(node.metrics().preemptions.Value() > 0);
  CHECK(node.metrics().decoded_tokens(true).Value() == 600);
  CHECK(node.metrics().decoded_tokens(false).Value() == 0);
}

}  // namespace
}  // namespace sluice
