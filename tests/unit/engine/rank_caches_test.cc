// These tests are of the caches of a node whose model ranks divide: prompts that are handed over,
// sequences that are kept or preempted, and prefixes that prompts share. The ranks are threads of
// this process. Each is held to a node of one rank.
#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using testing::OnRanks;

using Answers = std::vector<std::vector<int32_t>>;

NodeOptions OptionsFor(const std::string& model, const std::string& policy = "full") {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(model);
  options.kernels = "portable";
  options.kv_dtype = DType::kFloat32;
  options.max_context = 512;
  options.max_sequences = 4;
  options.policy.name = policy;
  options.policy.dense_layers = 1;
  options.policy.workers = 1;
  options.policy.budget_tokens = 1024;  // Every policy attends to all, and so is exact.
  options.policy.worker_deadline = absl::Seconds(60);
  options.policy.scout.layer_ahead = false;
  options.policy.recall.margin = std::numeric_limits<float>::infinity();
  options.policy.hgca.window_tokens = 64;
  options.policy.hgca.beta = 0;
  return options;
}

const std::vector<fixtures::GoldenCase>& GoldenOf(const std::string& model) {
  static std::map<std::string, std::vector<fixtures::GoldenCase>> all;
  const auto [at, is_new] = all.try_emplace(model);
  if (is_new) at->second = *fixtures::LoadGolden(model);
  return at->second;
}

Request Handed(const std::string& transfer_id, uint32_t tokens) {
  Request request = GreedyRequest({}, tokens);
  request.handoff.transfer_id = transfer_id;
  return request;
}

// Hands every golden prompt over several times at once, whole and in part, and returns the answers.
Answers HandOver(Node& node, const std::string& model) {
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int round = 0; round < 3; ++round) {
    for (const fixtures::GoldenCase& g : GoldenOf(model)) {
      const auto prompt = static_cast<uint32_t>(g.prompt.size());
      const uint32_t context = round == 1 && prompt > 1 ? prompt - 1 : prompt;
      streams.push_back(node.Start(Handed(node.Push(g.prompt, context, 30, g.k, g.v), 30)));
    }
  }
  Answers answers;
  for (auto& stream : streams) {
    const Generated got = Node::Collect(*stream);
    INFO(std::string(got.finish.status.ToString()));
    CHECK(got.finish.reason == FinishInfo::Reason::kLength);
    answers.push_back(got.ids);
  }
  return answers;
}

// Checks that ranks give the answers of one node, the second time too.
void CheckSame(const NodeOptions& options, int size, const std::function<Answers(Node&)>& ask) {
  Answers want;
  {
    Node alone(options);
    want = ask(alone);
  }
  OnRanks(options, size, [&](Node& node) {
    CHECK(ask(node) == want);
    CHECK(ask(node) == want);
    CHECK(node.Quiescent());
  });
}

TEST_CASE("ranks decode what is handed over as one node does", "[ranks]") {
  for (const std::string& name : fixtures::TinyModels()) {
    for (const int size : {2, 4}) {
      INFO(name << " on " << size);
      NodeOptions options = OptionsFor(name);
      options.prefix_cache = false;  // so that every block lands
      CheckSame(options, size, [&](Node& node) { return HandOver(node, name); });
    }
  }
}

TEST_CASE("ranks decode what is handed over under every policy", "[ranks]") {
  for (const char* policy : {"scout", "recall", "hgca"}) {
    INFO(policy);
    CheckSame(OptionsFor("tiny-llama", policy), 2,
              [](Node& node) { return HandOver(node, "tiny-llama"); });
  }
}

TEST_CASE("pages of DRAM go from one transfer to the next on every rank", "[ranks]") {
  for (const char* policy : {"full", "recall"}) {
    INFO(policy);
    NodeOptions options = OptionsFor("tiny-llama", policy);
    options.dram_bytes = int64_t{1} << 20;  // Room for a few prompts of 257 tokens.
    const fixtures::GoldenCase& g = GoldenOf("tiny-llama")[2];
    const auto prompt = static_cast<uint32_t>(g.prompt.size());
    std::vector<int32_t> want;
    {
      Node alone(options);
      want = alone.Generate(Handed(alone.Push(g.prompt, prompt, 20, g.k, g.v), 20)).ids;
    }
    OnRanks(options, 2, [&](Node& node) {
      std::deque<std::shared_ptr<TokenStream>> streams;
      const auto take_oldest = [&] {
        // A slot goes back a little after its stream has ended.
        if (streams.empty()) return absl::SleepFor(absl::Milliseconds(1));
        CHECK(Node::Collect(*streams.front()).ids == want);
        streams.pop_front();
      };
      int begun = 0, refused = 0;
      SplitMix64 random(3);
      while (begun < 60) {
        Manifest manifest = node.MakeManifest(g.prompt, prompt, 20);
        manifest.tenant = absl::StrCat("t", begun);  // so that no prefix is shared
        const auto reserved = node.transfers().Reserve(manifest);
        if (!reserved.ok()) {
          REQUIRE(absl::IsResourceExhausted(reserved.status()));
          ++refused;
          take_oldest();
          continue;
        }
        for (uint32_t layer = 0; layer < g.k.size(); ++layer) {
          const std::vector<uint8_t> payload = node.ChunkPayload(g.k[layer], g.v[layer], 0, prompt);
          ChunkHeader header{reserved->transfer_id, layer, "kv", 0, 2, 0, prompt, Crc32c(payload)};
          REQUIRE(node.Land(header, payload).ok());
        }
        if (random.Below(4) == 0) {
          REQUIRE(node.transfers().Abort(reserved->transfer_id, "").ok());
          continue;
        }
        REQUIRE(node.transfers().Commit(reserved->transfer_id, {}, nullptr).ok());
        Request request = Handed(reserved->transfer_id, 20);
        request.handoff.tenant = manifest.tenant;
        streams.push_back(node.Start(std::move(request)));
        ++begun;
      }
      while (!streams.empty()) take_oldest();
      CHECK(refused > 0);
    });
  }
}

// Returns the answers of two turns, of which the first is kept.
Answers TwoTurns(Node& node) {
  Answers answers;
  for (const fixtures::GoldenCase& g : GoldenOf("tiny-llama")) {
    Request first = GreedyRequest(g.prompt, 20);
    first.keep = absl::Seconds(30);
    const Generated one = node.Generate(std::move(first));
    REQUIRE(!one.finish.sequence_id.empty());
    Request second = GreedyRequest({3, 4, 5, 6, 7, 8}, 20);
    second.handoff.sequence_id = one.finish.sequence_id;
    answers.push_back(one.ids);
    answers.push_back(node.Generate(std::move(second)).ids);
  }
  return answers;
}

TEST_CASE("ranks keep sequences as one node does", "[ranks]") {
  for (const char* policy : {"full", "scout", "recall", "hgca"}) {
    INFO(policy);
    for (const bool prefixes : {false, true}) {
      NodeOptions options = OptionsFor("tiny-llama", policy);
      options.prefix_cache = prefixes;
      CheckSame(options, 2, TwoTurns);
    }
  }
}

TEST_CASE("ranks preempt sequences as one node does", "[ranks]") {
  const auto ask = [&](Node& node) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 6; ++i) {
      const std::vector<int32_t> prompt(40 + 9 * static_cast<size_t>(i), 5 + i);
      streams.push_back(node.Start(GreedyRequest(prompt, 300)));
    }
    Answers answers;
    for (auto& stream : streams) answers.push_back(Node::Collect(*stream).ids);
    return answers;
  };
  NodeOptions options = OptionsFor("tiny-llama");
  Answers want;
  {
    Node alone(options);
    want = ask(alone);
  }
  options.hbm_bytes = int64_t{1} << 20;
  options.overcommit = 4;
  OnRanks(options, 2, [&](Node& node) {
    CHECK(ask(node) == want);
    CHECK(ask(node) == want);
    CHECK(node.metrics().preemptions.Value() > 0);
    CHECK(node.Quiescent());
  });
}

// Returns the answers to prompts that begin as earlier ones did, one after the other.
Answers Sharing(Node& node) {
  Answers answers;
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 100 + 20 * (i % 4); ++t) prompt.push_back((t * t + 7 * t + i / 8) % 90 + 3);
    for (int t = 0; t < i; ++t) prompt.push_back(5 + t);
    answers.push_back(node.Generate(GreedyRequest(prompt, 40)).ids);
    REQUIRE(node.Quiescent());
  }
  return answers;
}

TEST_CASE("ranks share the blocks of equal prefixes", "[ranks]") {
  for (const char* policy : {"full", "scout", "recall"}) {
    INFO(policy);
    NodeOptions options = OptionsFor("tiny-llama", policy);
    Answers want;
    {
      NodeOptions without = options;
      without.prefix_cache = false;
      Node alone(without);
      want = Sharing(alone);
    }
    // A part of it is kept while prompts come: blocks are dropped and used again.
    options.dram_bytes = int64_t{2} << 20;
    OnRanks(options, 2, [&](Node& node) {
      CHECK(Sharing(node) == want);
      CHECK(Sharing(node) == want);
      CHECK(node.metrics().prefix_hits.Value() > 500);
    });
  }
}

TEST_CASE("hints reach the ranks that have their heads", "[ranks]") {
  SelectionHints hints;
  hints.unit_tokens = 32;
  hints.entries = {{0, 0, std::nullopt, {1}},
                   {0, 1, std::nullopt, {2}},
                   {1, std::nullopt, std::nullopt, {3}},
                   {2, 3, std::nullopt, {4}}};
  // Two layers of four query heads of two numbers, of which the rank has heads 1 and 2.
  for (int i = 0; i < 16; ++i) hints.queries.push_back(static_cast<float>(i));
  const HintPart part{1, 2, 1, 2, 4, 2};
  CHECK(part.QueriesOfAll(8) == 16);
  const SelectionHints second = HintsOf(hints, part);
  CHECK(second.queries == std::vector<float>{2, 3, 4, 5, 10, 11, 12, 13});
  REQUIRE(second.entries.size() == 2);
  CHECK(second.entries[0].kv_head == 0u);
  CHECK(second.entries[0].units == std::vector<uint32_t>{2});
  CHECK(!second.entries[1].kv_head.has_value());
  CHECK(HintsOf(hints, {}).entries.size() == 4);
  CHECK(HintsOf(hints, {}).queries == hints.queries);

  NodeOptions options = OptionsFor("tiny-llama", "recall");
  options.policy.budget_tokens = 128;
  const fixtures::GoldenCase& g = GoldenOf("tiny-llama")[2];
  const auto prompt = static_cast<uint32_t>(g.prompt.size());
  const auto ask = [&](Node& node) {
    const auto reserved = OrFail(node.transfers().Reserve(node.MakeManifest(g.prompt, prompt, 20)));
    for (uint32_t layer = 0; layer < g.k.size(); ++layer) {
      const std::vector<uint8_t> payload = node.ChunkPayload(g.k[layer], g.v[layer], 0, prompt);
      ChunkHeader header{reserved.transfer_id, layer, "kv", 0, 2, 0, prompt, Crc32c(payload)};
      if (reserved.cached_tokens < prompt) OrFail(node.Land(header, payload));
    }
    SelectionHints sent;
    sent.unit_tokens = 32;
    for (uint32_t layer = 0; layer < g.k.size(); ++layer) {
      for (uint32_t head = 0; head < 2; ++head) {
        sent.entries.push_back({layer, head, std::nullopt, {head, 2 + head, 5}});
      }
    }
    OrFail(node.transfers().Commit(reserved.transfer_id, {}, nullptr, sent));
    return Answers{node.Generate(Handed(reserved.transfer_id, 20)).ids};
  };
  CheckSame(options, 2, ask);
}

}  // namespace
}  // namespace sluice
