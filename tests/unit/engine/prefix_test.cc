// Tests sequences that begin with the blocks of earlier ones: under every policy they give what
// they give without, and what they share is never at anyone's cost.
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "src/base/error.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/cases.h"
#include "tests/support/eventually.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr uint32_t kOutput = 40;
constexpr int kBlock = 16;

NodeOptions Options(const std::string& policy) {
  NodeOptions options;
  const bool latent = absl::StrContains(policy, "latent");
  options.policy.name = policy.substr(0, policy.find(','));
  options.model_dir = fixtures::ModelDir(latent ? "tiny-deepseek-v32" : "tiny-llama");
  // Prompts' rows and decode rows sum in other orders. Whether a token shows that, where two are
  // nearly alike, must not depend on the processor.
  options.kernels = "portable";
  options.max_context = 512;
  options.max_sequences = 4;
  options.block_tokens = kBlock;
  options.kv_dtype = absl::StrContains(policy, "packed") ? DType::kFloat8E4M3 : DType::kFloat32;
  options.policy.dense_layers = 1;
  options.policy.budget_tokens = 1024;  // all of it: every policy is exact
  options.policy.worker_deadline = absl::Seconds(60);
  options.policy.scout.layer_ahead = false;
  options.policy.recall.margin = std::numeric_limits<float>::infinity();
  options.policy.hgca.window_tokens = 48;
  options.policy.hgca.beta = 0;
  options.policy.ess.sparse_memory_ratio = 0.2;
  options.policy.ess.least_places = 0;
  const bool digests = absl::StrContains(policy, "digests");
  options.policy.fluxion.digests_in_dram = digests;
  options.policy.fluxion.resident = !digests;
  return options;
}

std::vector<int32_t> Tokens(int count, int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * i + seed * 31 + i * 7) % 90 + 3);
  return tokens;
}

std::vector<int32_t> Joined(std::initializer_list<std::vector<int32_t>> parts) {
  std::vector<int32_t> all;
  for (const std::vector<int32_t>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Request ByTenant(std::vector<int32_t> prompt, const std::string& tenant) {
  Request request = GreedyRequest(std::move(prompt), kOutput);
  request.handoff.tenant = tenant;
  request.sampling.logprobs = 1;
  return request;
}

// Generates after the engine has come to rest, so that what ended before is shared.
Generated After(Node& node, Request request) {
  REQUIRE(node.Quiescent());
  return node.Generate(std::move(request));
}

void CheckSame(const Generated& got, const Generated& want) {
  INFO(std::string(got.finish.status.ToString()));
  CHECK(got.ids == want.ids);
  CHECK(got.finish.exact_tokens == want.finish.exact_tokens);
}

void CheckSameBits(const Generated& got, const Generated& want) {
  CheckSame(got, want);
  for (size_t i = 0; i < std::min(got.tokens.size(), want.tokens.size()); ++i) {
    REQUIRE(got.tokens[i].logprob == want.tokens[i].logprob);
  }
}

TEST_CASE("a prompt that begins as an earlier one gives what it gives without, on every policy") {
  for (const std::string policy :
       testing::CasesToRun({"full", "oracle", "scout", "recall", "hgca", "clo", "fluxion",
                            "fluxion, digests in DRAM", "full, latent", "ess, latent",
                            "full, latent, packed", "ess, latent, packed"})) {
    INFO(policy);
    NodeOptions options = Options(policy);
    Node node(options);
    options.prefix_cache = false;
    Node without(options);
    const std::vector<int32_t> system = Tokens(150, 1);
    const Generated one = After(node, ByTenant(system, ""));
    CHECK(one.finish.reused_tokens == 0);
    CheckSameBits(one, without.Generate(ByTenant(system, "")));

    // Nine tenths of the prompt are the same: caches of a prompt's rows, to the bit.
    const std::vector<int32_t> other =
        Joined({{system.begin(), system.begin() + 135}, Tokens(15, 7)});
    const Generated two = After(node, ByTenant(other, ""));
    // Policy ess computes a prompt's last 32 rows again, so it leaves their blocks out.
    const bool ess = absl::StrContains(policy, "ess");
    CHECK(two.finish.reused_tokens == (ess ? 112 : 128));
    CHECK(two.finish.cached_tokens == two.finish.reused_tokens);
    CheckSameBits(two, without.Generate(ByTenant(other, "")));

    // A second turn: prompt, answer, and something new.
    const std::vector<int32_t> turn = Joined({system, one.ids, Tokens(30, 2)});
    const Generated three = After(node, ByTenant(turn, ""));
    // The answer's last token has no caches.
    CHECK(three.finish.reused_tokens == (150 + kOutput - 1) / kBlock * kBlock);
    // An answer's caches come from decode rows, which sum in another order than a prompt's; in
    // eight bits that may show in a model of random weights.
    if (!absl::StrContains(policy, "packed")) {
      CheckSame(three, without.Generate(ByTenant(turn, "")));
    }

    // The same prompt again: its last row at least is computed anew.
    const Generated again = After(node, ByTenant(system, ""));
    CHECK(again.finish.reused_tokens >= 150 - 32 - kBlock);
    CheckSameBits(again, one);
    const auto hits = node.metrics().prefix_hits.Value();
    CHECK(hits ==
          two.finish.reused_tokens + three.finish.reused_tokens + again.finish.reused_tokens);
    CHECK(node.metrics().prefix_queries.Value() ==
          static_cast<double>(system.size() * 2 + other.size() + turn.size()));
    CHECK(node.Quiescent());
    CHECK(node.dram().UsageOf(0).idle_bytes > 0);
  }
}

TEST_CASE("nobody begins with another tenant's blocks") {
  for (const char* policy : {"full", "scout"}) {
    Node node(Options(policy));
    const std::vector<int32_t> prompt = Tokens(100, 3);
    const Generated mine = After(node, ByTenant(prompt, "a"));
    CHECK(After(node, ByTenant(prompt, "b")).finish.reused_tokens == 0);
    CHECK(After(node, ByTenant(prompt, "")).finish.reused_tokens == 0);
    const Generated again = After(node, ByTenant(prompt, "a"));
    CHECK(again.finish.reused_tokens == 96);
    CheckSameBits(again, mine);
  }
}

TEST_CASE("what follows a row that did not attend to everything is not left to others") {
  for (const char* policy : {"scout", "recall", "hgca", "clo"}) {
    INFO(policy);
    NodeOptions options = Options(policy);
    options.policy.budget_tokens = 96;
    options.policy.hgca.window_tokens = 32;
    options.policy.hgca.beta = 1;
    Node node(options);
    const std::vector<int32_t> prompt = Tokens(160, 5);
    const Generated one = node.Generate(ByTenant(prompt, ""));
    REQUIRE(one.finish.exact_tokens < one.ids.size());
    const Generated two = After(node, ByTenant(Joined({prompt, one.ids, Tokens(9, 1)}), ""));
    CHECK(two.finish.reused_tokens == 160);
    CHECK(two.finish.exact_tokens > 0);
  }
}

TEST_CASE("a running sequence shares its prompt where it lies in DRAM") {
  for (const char* policy : {"scout", "hgca"}) {
    INFO(policy);
    NodeOptions options = Options(policy);
    Node node(options);
    const std::vector<int32_t> prompt = Tokens(200, 4);
    Request first = GreedyRequest(prompt, 300);
    const auto running = node.Start(first);
    REQUIRE(testing::Eventually(absl::Seconds(20), [&] {
      return node.transfers().prefixes()->Find("", prompt).tokens() == 192;
    }));
    const int64_t before = node.dram().UsageOf(0).used_bytes;
    CHECK(node.transfers().prefixes()->Count().idle_tokens == 0);
    const Generated second = node.Generate(GreedyRequest(prompt, kOutput));
    CHECK(second.finish.reused_tokens == 192);
    CHECK(before > 0);
    const Generated whole = Node::Collect(*running);
    CHECK(std::equal(second.ids.begin(), second.ids.end(), whole.ids.begin()));
    CHECK(node.Quiescent());
  }
}

TEST_CASE("sequences of a kept one share its prompt, and its next turns write behind it") {
  for (const char* policy : {"full", "scout"}) {
    INFO(policy);
    NodeOptions options = Options(policy);
    Node node(options);
    options.prefix_cache = false;
    Node without(options);
    const std::vector<int32_t> prompt = Tokens(100, 6);
    node.Generate(ByTenant(prompt, ""));
    REQUIRE(node.Quiescent());
    Request kept = ByTenant(prompt, "");
    kept.keep = absl::Seconds(30);
    const Generated one = node.Generate(kept);
    CHECK(one.finish.reused_tokens == 96);
    REQUIRE(one.finish.sequence_id.size() == 32);
    const Generated other = node.Generate(ByTenant(prompt, ""));
    CHECK(other.finish.reused_tokens == 96);
    Request next = ByTenant(Tokens(3, 8), "");
    next.handoff.sequence_id = one.finish.sequence_id;
    const Generated two = node.Generate(next);
    CheckSame(two, without.Generate(ByTenant(Joined({prompt, one.ids, Tokens(3, 8)}), "")));
    CHECK(node.Quiescent());
  }
}

TEST_CASE("a next turn computes again only what is its own") {
  NodeOptions options = Options("ess, latent");
  Node node(options);
  options.prefix_cache = false;
  Node without(options);
  const std::vector<int32_t> prompt = Tokens(50, 6);
  node.Generate(GreedyRequest(prompt, 10));
  REQUIRE(node.Quiescent());
  // All of it fits its pool, so that no row is computed again; the next turn does not.
  Request kept = GreedyRequest(prompt, 10);
  kept.keep = absl::Seconds(30);
  const Generated one = node.Generate(kept);
  CHECK(one.finish.reused_tokens == 48);
  Request next = GreedyRequest(Tokens(2, 8), 60);
  next.handoff.sequence_id = one.finish.sequence_id;
  const Generated two = node.Generate(next);
  CheckSame(two, without.Generate(GreedyRequest(Joined({prompt, one.ids, Tokens(2, 8)}), 60)));
  CHECK(node.Quiescent());
}

TEST_CASE("preempted sequences come back with their shared blocks") {
  NodeOptions options = Options("full");
  options.max_sequences = 8;
  Node alone(options);
  options.overcommit = 3;
  options.hbm_bytes = alone.model().cache_layout().BytesFor(400) + 8192;
  Node node(options);
  const std::vector<int32_t> system = Tokens(64, 2);
  const auto request = [&](int i) {
    return GreedyRequest(Joined({system, Tokens(5 + i, 20 + i)}), 150);
  };
  std::vector<Generated> want;
  for (int i = 0; i < 8; ++i) want.push_back(alone.Generate(request(i)));
  CHECK(node.Generate(request(0)).ids == want[0].ids);
  REQUIRE(node.Quiescent());
  for (int round = 0; round < 10 && node.metrics().preemptions.Value() < 2; ++round) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 8; ++i) streams.push_back(node.Start(request(i)));
    for (int i = 0; i < 8; ++i) {
      const Generated got = Node::Collect(*streams[static_cast<size_t>(i)]);
      CHECK(got.ids == want[static_cast<size_t>(i)].ids);
      CHECK(got.finish.reused_tokens >= 64);
    }
  }
  CHECK(node.metrics().preemptions.Value() >= 2);
  CHECK(node.Quiescent());
}

TEST_CASE("many prompts pass through little DRAM, and the newest are found") {
  for (const std::string policy : testing::CasesToRun({"full", "scout", "ess, latent"})) {
    INFO(policy);
    NodeOptions options = Options(policy);
    {
      Node probe(options);
      options.dram_bytes = probe.model().cache_layout().BytesFor(480) + 65536;
    }
    Node node(options);
    for (int i = 0; i < 12; ++i) {
      std::vector<std::shared_ptr<TokenStream>> streams;
      for (int k = 0; k < 3; ++k) streams.push_back(node.Start(ByTenant(Tokens(90, i), "")));
      for (const auto& stream : streams) {
        CHECK(Node::Collect(*stream).finish.reason != FinishInfo::Reason::kError);
      }
    }
    CHECK(node.transfers().prefixes()->Count().evicted_tokens > 0);
    CHECK(After(node, ByTenant(Tokens(90, 11), "")).finish.reused_tokens >= 48);
    CHECK(node.Quiescent());
  }
}

TEST_CASE("a prompt whose cache was bad is computed anew") {
  NodeOptions options = Options("full");
  options.kv_dtype = DType::kBFloat16;
  Node node(options);
  const fixtures::GoldenCase g = (*fixtures::LoadGolden("tiny-llama"))[1];
  const auto context = static_cast<uint32_t>(g.prompt.size());
  REQUIRE(context > 2 * kBlock);
  std::vector<std::vector<uint16_t>> v = g.v;
  v[0][0] = FloatToBFloat16(std::numeric_limits<float>::quiet_NaN());
  Request bad = GreedyRequest({}, 5);
  bad.handoff.transfer_id = node.Push(g.prompt, context, 5, g.k, v);
  CHECK(absl::IsInternal(node.Generate(bad).finish.status));
  const Generated good = After(node, GreedyRequest(g.prompt, 5));
  CHECK(good.finish.reused_tokens == 0);
  CHECK(good.ids.size() == 5);
  CHECK(After(node, GreedyRequest(g.prompt, 5)).finish.reused_tokens > 0);
}

}  // namespace
}  // namespace sluice
