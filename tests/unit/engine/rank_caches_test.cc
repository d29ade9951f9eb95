// These tests are of the caches of a node whose model, or whose experts, ranks divide: prompts that
// are handed over, sequences that are kept or preempted, and prefixes that prompts share. The ranks
// are threads of this process. Each is held to a node of one rank.
#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/cases.h"
#include "tests/support/node.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::CasesToRun;
using testing::Generated;
using testing::GreedyRequest;
using testing::kSanitized;
using testing::Node;
using testing::NodeOptions;
using testing::OnRanks;

using Answers = std::vector<std::vector<int32_t>>;

constexpr char kExperts[] = "tiny-deepseek-v32";  // Its ranks have sequences of their own.

NodeOptions OptionsFor(const std::string& model, const std::string& policy = "full") {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(model);
  options.kernels = "portable";
  options.kv_dtype = DType::kFloat32;
  options.max_context = 512;
  options.max_sequences = 4;
  options.policy.name = policy;
  options.divide_experts = absl::StrContains(model, "deepseek");
  options.policy.dense_layers = 1;
  options.policy.workers = 1;
  options.policy.budget_tokens = 1024;  // Every policy attends to all, and so is exact.
  options.policy.worker_deadline = absl::Seconds(60);
  options.policy.scout.layer_ahead = false;
  options.policy.recall.margin = std::numeric_limits<float>::infinity();
  options.policy.hgca.window_tokens = 64;
  options.policy.hgca.beta = 0;
  options.policy.ess.sparse_memory_ratio = 0.2;
  options.policy.ess.least_places = 0;
  return options;
}

const std::vector<fixtures::GoldenCase>& GoldenOf(const std::string& model) {
  static std::map<std::string, std::vector<fixtures::GoldenCase>> all;
  const auto [at, is_new] = all.try_emplace(model);
  if (is_new) at->second = *fixtures::LoadGolden(model);
  return at->second;
}

// Returns the float32 values of `context` tokens, of each those of every array in turn. An array
// has those of all of the prompt's tokens.
std::vector<uint8_t> Rows(const fixtures::GoldenCase& g, uint32_t context,
                          std::initializer_list<const std::vector<uint16_t>*> arrays) {
  std::vector<float> values;
  for (size_t token = 0; token < context; ++token) {
    for (const std::vector<uint16_t>* array : arrays) {
      const size_t width = array->size() / g.prompt.size();
      for (size_t i = 0; i < width; ++i) {
        values.push_back(BFloat16ToFloat((*array)[token * width + i]));
      }
    }
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.size() * sizeof(float)};
}

// Lands the first `context` tokens of a golden prompt's caches.
void LandAll(Node& node, const std::string& transfer_id, const fixtures::GoldenCase& g,
             uint32_t context) {
  const CacheLayout& layout = node.transfers().layout();
  for (uint32_t layer = 0; layer < static_cast<uint32_t>(layout.layers); ++layer) {
    for (const CacheKind& kind : layout.kinds) {
      const std::vector<uint8_t> payload =
          kind.name == "kv"       ? node.ChunkPayload(g.k[layer], g.v[layer], 0, context)
          : kind.name == "latent" ? Rows(g, context, {&g.latent[layer], &g.rope[layer]})
                                  : Rows(g, context, {&g.index[layer]});
      ChunkHeader header{transfer_id, layer,   kind.name,      0, static_cast<uint32_t>(kind.heads),
                         0,           context, Crc32c(payload)};
      OrFail(node.Land(header, payload));
    }
  }
}

// Hands the first `context` tokens of a golden prompt over, and returns the transfer's id.
std::string HandOver(Node& node, const fixtures::GoldenCase& g, uint32_t context,
                     uint32_t max_new_tokens) {
  const auto reserved =
      OrFail(node.transfers().Reserve(node.MakeManifest(g.prompt, context, max_new_tokens)));
  LandAll(node, reserved.transfer_id, g, context);
  OrFail(node.transfers().Commit(reserved.transfer_id, {}, nullptr));
  return reserved.transfer_id;
}

Request Handed(const std::string& transfer_id, uint32_t tokens) {
  Request request = GreedyRequest({}, tokens);
  request.handoff.transfer_id = transfer_id;
  return request;
}

// Hands every golden prompt over several times at once, whole and in part, and returns the answers.
Answers HandAllOver(Node& node, const std::string& model) {
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int round = 0; round < 3; ++round) {
    for (const fixtures::GoldenCase& g : GoldenOf(model)) {
      const auto prompt = static_cast<uint32_t>(g.prompt.size());
      const uint32_t context = round == 1 && prompt > 1 ? prompt - 1 : prompt;
      const uint32_t tokens = kSanitized ? 10 : 30;
      streams.push_back(node.Start(Handed(HandOver(node, g, context, tokens), tokens)));
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
    NodeOptions whole = options;
    whole.divide_experts = false;
    Node alone(whole);
    want = ask(alone);
  }
  OnRanks(options, size, [&](Node& node) {
    CHECK(ask(node) == want);
    CHECK(ask(node) == want);
    CHECK(node.Quiescent());
  });
}

// A model, and a policy that its ranks have.
struct Kind {
  const char* model;
  const char* policy;
};

TEST_CASE("ranks decode what is handed over as one node does", "[ranks]") {
  std::vector<std::string> names = fixtures::TinyModels();
  names.insert(names.end(), fixtures::TinyLatentModels().begin(),
               fixtures::TinyLatentModels().end());
  for (const std::string& name : names) {
    for (const int size : {2, 4}) {
      if (kSanitized && size > 2) continue;
      INFO(name << " on " << size);
      NodeOptions options = OptionsFor(name);
      options.prefix_cache = false;  // so that every block lands
      CheckSame(options, size, [&](Node& node) { return HandAllOver(node, name); });
    }
  }
}

TEST_CASE("ranks decode what is handed over under every policy", "[ranks]") {
  for (const auto& [model, policy] :
       CasesToRun({Kind{"tiny-llama", "scout"}, Kind{"tiny-llama", "recall"},
                   Kind{"tiny-llama", "hgca"}, Kind{kExperts, "ess"}})) {
    INFO(policy);
    NodeOptions options = OptionsFor(model, policy);
    // A row of ess's after a shared prefix has other bits than one after what was handed over.
    options.prefix_cache = !options.divide_experts;
    CheckSame(options, 2, [&](Node& node) { return HandAllOver(node, model); });
  }
}

TEST_CASE("pages of DRAM go from one transfer to the next on every rank", "[ranks]") {
  for (const auto& [model, policy] :
       CasesToRun({Kind{"tiny-llama", "full"}, Kind{"tiny-llama", "recall"}, Kind{kExperts, "full"},
                   Kind{kExperts, "ess"}})) {
    INFO(model << " under " << policy);
    NodeOptions options = OptionsFor(model, policy);
    const fixtures::GoldenCase& g = GoldenOf(model)[2];
    const auto prompt = static_cast<uint32_t>(g.prompt.size());
    std::vector<int32_t> want;
    {
      NodeOptions whole = options;
      whole.divide_experts = false;
      Node alone(whole);
      want = alone.Generate(Handed(HandOver(alone, g, prompt, 20), 20)).ids;
      // Room for a few prompts of 257 tokens.
      options.dram_bytes = options.divide_experts
                               ? 3 * alone.transfers().layout().BytesFor(prompt + 32) + 8192
                               : int64_t{1} << 20;
    }
    OnRanks(options, 2, [&](Node& node) {
      std::deque<std::shared_ptr<TokenStream>> streams;
      const auto take_oldest = [&] {
        // A slot goes back a little after its stream has ended.
        if (streams.empty()) return absl::SleepFor(absl::Milliseconds(1));
        CHECK(Node::Collect(*streams.front()).ids == want);
        streams.pop_front();
      };
      int begun = 0, refused = 0, made = 0;
      SplitMix64 random(3);
      struct Reserved {
        std::string id, tenant;
      };
      std::vector<Reserved> open;
      const auto abort_last = [&] {
        REQUIRE(node.transfers().Abort(open.back().id, "").ok());
        open.pop_back();
      };
      while (begun < (kSanitized ? 20 : 60)) {
        // DRAM is always full, so that the next transfer takes what another gives back.
        Manifest manifest = node.MakeManifest(g.prompt, prompt, 20);
        manifest.tenant = absl::StrCat("t", made);  // so that no prefix is shared
        const auto reserved = node.transfers().Reserve(manifest);
        if (reserved.ok()) {
          ++made;
          open.push_back({reserved->transfer_id, manifest.tenant});
          continue;
        }
        REQUIRE(absl::IsResourceExhausted(reserved.status()));
        ++refused;
        if (open.empty()) {
          take_oldest();
          continue;
        }
        std::swap(open[random.Below(open.size())], open.back());
        LandAll(node, open.back().id, g, prompt);
        if (random.Below(4) == 0) {
          abort_last();
          continue;
        }
        REQUIRE(node.transfers().Commit(open.back().id, {}, nullptr).ok());
        Request request = Handed(open.back().id, 20);
        request.handoff.tenant = open.back().tenant;
        open.pop_back();
        streams.push_back(node.Start(std::move(request)));
        ++begun;
      }
      while (!open.empty()) abort_last();
      while (!streams.empty()) take_oldest();
      CHECK(refused > 0);
    });
  }
}

// Returns the answers of two turns, of which the first is kept.
Answers TwoTurns(Node& node, const char* model) {
  Answers answers;
  for (const fixtures::GoldenCase& g : GoldenOf(model)) {
    const uint32_t tokens = kSanitized ? 6 : 20;
    Request first = GreedyRequest(g.prompt, tokens);
    first.keep = absl::Seconds(30);
    const Generated one = node.Generate(std::move(first));
    REQUIRE(!one.finish.sequence_id.empty());
    Request second = GreedyRequest({3, 4, 5, 6, 7, 8}, tokens);
    second.handoff.sequence_id = one.finish.sequence_id;
    answers.push_back(one.ids);
    answers.push_back(node.Generate(std::move(second)).ids);
  }
  return answers;
}

TEST_CASE("ranks keep sequences as one node does", "[ranks]") {
  for (const auto& [model, policy] : CasesToRun(
           {Kind{"tiny-llama", "full"}, Kind{"tiny-llama", "scout"}, Kind{"tiny-llama", "recall"},
            Kind{"tiny-llama", "hgca"}, Kind{kExperts, "full"}, Kind{kExperts, "ess"}})) {
    INFO(model << " under " << policy);
    for (const bool prefixes : {false, true}) {
      NodeOptions options = OptionsFor(model, policy);
      options.prefix_cache = prefixes;
      CheckSame(options, 2, [&](Node& node) { return TwoTurns(node, model); });
    }
  }
}

TEST_CASE("ranks preempt sequences as one node does", "[ranks]") {
  const auto ask = [&](Node& node) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 6; ++i) {
      const std::vector<int32_t> prompt(40 + 9 * static_cast<size_t>(i), 5 + i);
      streams.push_back(node.Start(GreedyRequest(prompt, kSanitized ? 100 : 300)));
    }
    Answers answers;
    for (auto& stream : streams) answers.push_back(Node::Collect(*stream).ids);
    return answers;
  };
  for (const char* model : {"tiny-llama", kExperts}) {
    INFO(model);
    NodeOptions options = OptionsFor(model);
    Answers want;
    {
      NodeOptions whole = options;
      whole.divide_experts = false;
      Node alone(whole);
      want = ask(alone);
      // Each rank of experts has room for one whole sequence and a half.
      const int64_t room = kSanitized ? 280 : 580;
      options.hbm_bytes =
          options.divide_experts ? alone.transfers().layout().BytesFor(room) + 8192 : room << 11;
    }
    options.overcommit = 4;
    OnRanks(options, 2, [&](Node& node) {
      CHECK(ask(node) == want);
      if (!kSanitized) CHECK(ask(node) == want);
      CHECK(node.metrics().preemptions.Value() > 0);
      CHECK(node.Quiescent());
    });
  }
}

// Returns the answers to prompts that begin as earlier ones did, one after the other.
Answers Sharing(Node& node) {
  Answers answers;
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 100 + 20 * (i % 4); ++t) prompt.push_back((t * t + 7 * t + i / 8) % 90 + 3);
    for (int t = 0; t < i; ++t) prompt.push_back(5 + t);
    answers.push_back(node.Generate(GreedyRequest(prompt, kSanitized ? 4 : 12)).ids);
    REQUIRE(node.Quiescent());
  }
  return answers;
}

TEST_CASE("ranks share the blocks of equal prefixes", "[ranks]") {
  for (const auto& [model, policy] :
       CasesToRun({Kind{"tiny-llama", "full"}, Kind{"tiny-llama", "scout"},
                   Kind{"tiny-llama", "recall"}, Kind{kExperts, "full"}, Kind{kExperts, "ess"}})) {
    INFO(model << " under " << policy);
    NodeOptions options = OptionsFor(model, policy);
    Answers want;
    {
      NodeOptions without = options;
      without.prefix_cache = without.divide_experts = false;
      Node alone(without);
      want = Sharing(alone);
      // A part of it is kept while prompts come: blocks are dropped and used again.
      options.dram_bytes =
          options.divide_experts ? alone.transfers().layout().BytesFor(600) : int64_t{2} << 20;
    }
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
    if (reserved.cached_tokens < prompt) LandAll(node, reserved.transfer_id, g, prompt);
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

// Returns for each rank of experts how many sequences it has, or is to have.
std::vector<int> Load(Node& node) {
  std::vector<int> sequences;
  for (int rank = 0; rank < node.ledger().ranks(); ++rank) {
    sequences.push_back(node.ledger().sequences(rank));
  }
  return sequences;
}

TEST_CASE("a sequence is where its transfer was reserved, and transfers are spread", "[ranks]") {
  const fixtures::GoldenCase& g = GoldenOf(kExperts)[2];
  const auto prompt = static_cast<uint32_t>(g.prompt.size());
  NodeOptions options = OptionsFor(kExperts);
  options.prefix_cache = false;
  OnRanks(options, 2, [&](Node& node) {
    std::vector<std::string> ids;
    for (int i = 0; i < 3; ++i) {
      ids.push_back(
          OrFail(node.transfers().Reserve(node.MakeManifest(g.prompt, prompt, 20))).transfer_id);
    }
    CHECK(Load(node) == std::vector<int>{2, 1});
    const auto taken = [](const PagePool& pool) { return pool.UsageOf(0).used_bytes; };
    CHECK(taken(node.dram()) == 2 * taken(node.dram_of(1)));
    OrFail(node.transfers().Reserve(node.MakeManifest(g.prompt, prompt, 20)));
    CHECK(taken(node.dram()) == taken(node.dram_of(1)));
    // The second is rank 1's. It counts on while it runs.
    LandAll(node, ids[1], g, prompt);
    OrFail(node.transfers().Commit(ids[1], {}, nullptr));
    const auto stream = node.Start(Handed(ids[1], 20));
    stream->ReadBlocking();
    CHECK(taken(node.hbm()) == 0);
    Node::Collect(*stream);
    for (const std::string& id : ids) REQUIRE(node.transfers().Abort(id, "").ok());
  });
}

TEST_CASE("a full rank leaves transfers to another, and only a full node refuses", "[ranks]") {
  const fixtures::GoldenCase& g = GoldenOf(kExperts)[2];
  const auto prompt = static_cast<uint32_t>(g.prompt.size());
  NodeOptions options = OptionsFor(kExperts);
  options.prefix_cache = false;
  {
    NodeOptions whole = options;
    whole.divide_experts = false;
    Node alone(whole);
    options.dram_bytes = alone.transfers().layout().BytesFor(2 * (prompt + 31)) + 8192;
  }
  OnRanks(options, 2, [&](Node& node) {
    std::vector<std::string> ids;
    const auto reserve = [&] {
      const auto made = node.transfers().Reserve(node.MakeManifest(g.prompt, prompt, 20));
      if (made.ok()) ids.push_back(made->transfer_id);
      return made.status();
    };
    for (int i = 0; i < 4; ++i) CHECK(reserve().ok());
    const absl::Status refused = reserve();
    CHECK(absl::IsResourceExhausted(refused));
    CHECK(absl::StrContains(refused.message(), "in DRAM of any rank"));
    // The pages that rank 1 gives back go to the next one, although rank 0 was first when all were
    // empty.
    REQUIRE(node.transfers().Abort(ids[1], "").ok());
    CHECK(Load(node) == std::vector<int>{2, 1});
    CHECK(reserve().ok());
    CHECK(Load(node) == std::vector<int>{2, 2});
    for (const std::string& id : ids) REQUIRE(node.transfers().Abort(id, "").ok());
    CHECK(node.Quiescent());
  });
}

TEST_CASE("a prompt goes to the rank that has its beginning, if there is room", "[ranks]") {
  NodeOptions options = OptionsFor(kExperts);
  {
    NodeOptions whole = options;
    whole.divide_experts = false;
    Node alone(whole);
    options.hbm_bytes = alone.transfers().layout().BytesFor(600) + 8192;  // One whole sequence.
  }
  OnRanks(options, 2, [&](Node& node) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 200; ++t) prompt.push_back((7 * t * t + t) % 500);
    const Generated first = node.Generate(GreedyRequest(prompt, 20));
    const auto known = [&](int rank) {
      return node.transfers().prefixes(rank)->Find("", prompt).tokens();
    };
    REQUIRE(node.Quiescent());
    CHECK(known(0) == 192);
    CHECK(known(1) == 0);
    // Rank 0 has the beginning, and room.
    Manifest manifest = node.MakeManifest(prompt, 200, 300);
    const auto there = OrFail(node.transfers().Reserve(manifest));
    CHECK(there.cached_tokens == 192);
    CHECK(Load(node) == std::vector<int>{1, 0});
    // Now only rank 1 has room in HBM, so the next one is there, and shares nothing.
    const auto other = OrFail(node.transfers().Reserve(manifest));
    CHECK(other.cached_tokens == 0);
    CHECK(Load(node) == std::vector<int>{1, 1});
    for (const auto& each : {there, other}) {
      REQUIRE(node.transfers().Abort(each.transfer_id, "").ok());
    }
    // The same with a prompt that is computed here.
    const Generated again = node.Generate(GreedyRequest(prompt, 20));
    CHECK(again.ids == first.ids);
    CHECK(again.finish.reused_tokens == 192);
    CHECK(node.Quiescent());
  });
}

}  // namespace
}  // namespace sluice
