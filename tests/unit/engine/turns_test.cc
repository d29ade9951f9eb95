// Tests sequences that are kept after their Generate, and their next turns.
#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/manual_clock.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/cases.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr uint32_t kOutput = 12;

NodeOptions Options(const std::string& policy) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 1024;
  options.max_sequences = 3;
  options.block_tokens = 16;
  options.kv_dtype = DType::kFloat32;
  options.policy.name = policy;
  options.policy.dense_layers = 1;
  options.policy.budget_tokens = 1024;  // all of it: every policy is exact
  options.policy.worker_deadline = absl::Seconds(60);
  options.policy.scout.layer_ahead = false;
  options.policy.scout.resident_tokens = 64;  // so that the CPU has much of it
  options.policy.recall.margin = std::numeric_limits<float>::infinity();
  options.policy.hgca.window_tokens = 48;
  options.policy.hgca.beta = 0;
  return options;
}

std::vector<int32_t> Tokens(int count, int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * i + seed * 31 + i * 7) % 90 + 3);
  return tokens;
}

Request Kept(std::vector<int32_t> prompt, absl::Duration keep = absl::Seconds(30)) {
  Request request = GreedyRequest(std::move(prompt), kOutput);
  request.keep = keep;
  return request;
}

// Returns the request of another turn of a kept sequence.
Request Next(const Generated& before, std::vector<int32_t> appended,
             absl::Duration keep = absl::ZeroDuration()) {
  Request request = Kept(std::move(appended), keep);
  request.handoff.sequence_id = before.finish.sequence_id;
  return request;
}

std::vector<int32_t> Joined(std::initializer_list<std::vector<int32_t>> parts) {
  std::vector<int32_t> all;
  for (const std::vector<int32_t>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST_CASE("turns of a kept sequence give what one prompt of all of them gives") {
  for (const std::string policy :
       testing::CasesToRun({"full", "oracle", "scout", "recall", "hgca", "clo", "fluxion",
                            "fluxion, digests in DRAM"})) {
    INFO(policy);
    NodeOptions options = Options(policy.substr(0, policy.find(',')));
    // A kept sequence then leaves pages, and needs more than its tokens do.
    const bool in_dram = absl::StrContains(policy, "DRAM");
    options.policy.fluxion.digests_in_dram = in_dram;
    options.policy.fluxion.resident = !in_dram;
    Node node(options);
    const std::vector<int32_t> first = Tokens(150, 1), second = Tokens(40, 2), third = Tokens(1, 3);
    const Generated one = node.Generate(Kept(first));
    REQUIRE(one.ids.size() == kOutput);
    REQUIRE(one.finish.sequence_id.size() == 32);
    const Generated two = node.Generate(Next(one, second, absl::Seconds(30)));
    INFO(std::string(two.finish.status.ToString()));
    REQUIRE(two.finish.sequence_id.size() == 32);
    CHECK(two.finish.prompt_tokens == 150 + kOutput + 40);
    // All but the newest token are cached; its keys and values are computed again.
    CHECK(two.finish.cached_tokens == 150 + kOutput - 1);
    const Generated three = node.Generate(Next(two, third, absl::Seconds(30)));
    // Nothing need be appended: the sequence goes on.
    const Generated four = node.Generate(Next(three, {}));
    CHECK(four.finish.sequence_id.empty());

    CHECK(node.Generate(GreedyRequest(Joined({first, one.ids, second}), kOutput)).ids == two.ids);
    const std::vector<int32_t> whole = Joined({first, one.ids, second, two.ids, third, three.ids});
    CHECK(node.Generate(GreedyRequest(whole, kOutput)).ids == four.ids);
    CHECK(node.Quiescent());
  }
}

TEST_CASE("a sequence is kept whatever else runs, and others may take its place meanwhile") {
  for (const char* policy : {"full", "scout", "hgca"}) {
    INFO(policy);
    Node node(Options(policy));
    std::vector<std::shared_ptr<TokenStream>> firsts, seconds;
    std::vector<Generated> ones;
    for (int i = 0; i < 6; ++i) firsts.push_back(node.Start(Kept(Tokens(60 + 17 * i, i))));
    for (const auto& stream : firsts) ones.push_back(Node::Collect(*stream));
    for (int i = 0; i < 6; ++i) {
      seconds.push_back(node.Start(Next(ones[static_cast<size_t>(i)], Tokens(20, 10 + i))));
    }
    for (int i = 0; i < 6; ++i) {
      const auto at = static_cast<size_t>(i);
      CHECK(Node::Collect(*seconds[at]).ids ==
            node
                .Generate(GreedyRequest(
                    Joined({Tokens(60 + 17 * i, i), ones[at].ids, Tokens(20, 10 + i)}), kOutput))
                .ids);
    }
    CHECK(node.Quiescent());
  }
}

TEST_CASE("what is wrong with a next turn is said, and leaves the sequence where it is") {
  for (const char* policy : {"full", "scout"}) {
    INFO(policy);
    Node node(Options(policy));
    const auto refused = [&](Request request) {
      static int count = 0;
      request.request_id = absl::StrCat("bad", ++count);
      request.sink = std::make_shared<TokenStream>(64);
      return node.engine().Submit(std::move(request)).status();
    };
    CHECK(FieldOf(refused(Kept({5}, absl::Hours(2)))) == "keep");
    const Generated one = node.Generate(Kept(Tokens(100, 1)));
    Request unknown = Next(one, {5});
    unknown.handoff.sequence_id[3] ^= 1;
    CHECK(ReasonOf(refused(unknown)) == "SEQUENCE_NOT_FOUND");
    Request anothers = Next(one, {5});
    anothers.handoff.tenant = "another";
    CHECK(ReasonOf(refused(anothers)) == "SEQUENCE_NOT_FOUND");
    // It is not a transfer, which could be written to or ended.
    Request as_transfer = GreedyRequest({}, 4);
    as_transfer.handoff.transfer_id = one.finish.sequence_id;
    CHECK(ReasonOf(refused(as_transfer)) == "TRANSFER_NOT_FOUND");
    CHECK(absl::IsNotFound(node.transfers().Commit(one.finish.sequence_id, {}, nullptr).status()));
    REQUIRE(node.transfers().Abort(one.finish.sequence_id, "").ok());
    const absl::Status too_long = refused(Next(one, Tokens(1024 - 100 - kOutput, 2)));
    CHECK(FieldOf(too_long) == "prompt_token_ids");
    CHECK(absl::StrContains(too_long.message(), "the kept sequence's tokens included"));
    Request too_many = Next(one, Tokens(50, 2));
    too_many.sampling.max_tokens = 1024;
    CHECK(FieldOf(refused(too_many)) == "sampling.max_tokens");
    Request no_token = Next(one, {1 << 20});
    CHECK(FieldOf(refused(no_token)) == "prompt_token_ids");

    const Generated two = node.Generate(Next(one, {5}, absl::Seconds(30)));
    CHECK(two.ids.size() == kOutput);
    CHECK(ReasonOf(refused(Next(one, {5}))) == "SEQUENCE_NOT_FOUND");  // it was taken
    CHECK_FALSE(node.engine().Forget(two.finish.sequence_id, "another"));
    CHECK(node.engine().Forget(two.finish.sequence_id, ""));
    CHECK_FALSE(node.engine().Forget(two.finish.sequence_id, ""));
    CHECK(node.Quiescent());
  }
}

TEST_CASE("a kept sequence goes with its lease, and its memory with it") {
  for (const char* policy : {"full", "hgca"}) {
    INFO(policy);
    ManualClock clock;
    NodeOptions options = Options(policy);
    options.clock = &clock;
    Node node(options);
    const Generated one = node.Generate(Kept(Tokens(100, 1), absl::Seconds(5)));
    REQUIRE_FALSE(one.finish.sequence_id.empty());
    clock.Advance(absl::Seconds(4));
    CHECK(node.transfers().kept().count() == 1);
    clock.Advance(absl::Seconds(2));
    Request late = Next(one, {5});
    late.request_id = "late";
    late.sink = std::make_shared<TokenStream>(64);
    CHECK(ReasonOf(node.engine().Submit(std::move(late)).status()) == "SEQUENCE_NOT_FOUND");
    CHECK(node.transfers().kept().count() == 0);
    CHECK(node.Quiescent());
  }
}

TEST_CASE("a sequence for which DRAM has no room ends as it would, and is not kept") {
  NodeOptions options = Options("full");
  options.dram_bytes = 64 << 10;
  Node node(options);
  const Generated one = node.Generate(Kept(Tokens(700, 1)));
  CHECK(one.ids.size() == kOutput);
  CHECK(one.finish.sequence_id.empty());
  CHECK(node.Quiescent());
}

TEST_CASE("a next turn that DRAM cannot take, while nothing runs, ends and makes room") {
  NodeOptions options = Options("scout");
  {
    Node probe(options);
    const CacheLayout& layout = probe.model().cache_layout();
    // DRAM for two sequences of 112 tokens and 128 more; a next turn lacks 176.
    options.dram_bytes =
        int64_t{352} * layout.layers * layout.kinds[0].heads * layout.kinds[0].bytes_per_token;
  }
  Node node(options);
  const Generated one = node.Generate(Kept(Tokens(100, 1)));
  const Generated two = node.Generate(Kept(Tokens(100, 2)));
  REQUIRE_FALSE(one.finish.sequence_id.empty());
  REQUIRE_FALSE(two.finish.sequence_id.empty());
  CHECK(ReasonOf(node.Generate(Next(one, Tokens(150, 3))).finish.status) == "DRAM_FULL");
  CHECK(node.Generate(Next(two, Tokens(150, 3))).ids.size() == kOutput);
  CHECK(node.Quiescent());
}

TEST_CASE("one that is cancelled or fails is not kept, and one that never had a slot is") {
  Node node(Options("scout"));
  const auto stream = node.Start(Kept(Tokens(300, 1)));
  node.engine().CancelAll(absl::CancelledError("test"));
  CHECK(Node::Collect(*stream).finish.sequence_id.empty());
  CHECK(node.Quiescent());

  // Its only token came with its caches.
  const std::vector<int32_t> prompt = Tokens(100, 2);
  const auto& kind = node.model().cache_layout().kinds[0];
  const auto elements = static_cast<size_t>(100 * kind.heads * kind.bytes_per_token / 2 / 4);
  const std::vector<std::vector<uint16_t>> zeros(
      static_cast<size_t>(node.model().cache_layout().layers), std::vector<uint16_t>(elements, 0));
  OutputToken first;
  first.id = 9;
  Request request = GreedyRequest({}, 1);
  request.handoff.transfer_id = node.Push(prompt, 100, 4, zeros, zeros, {first});
  request.keep = absl::Seconds(30);
  const Generated one = node.Generate(std::move(request));
  REQUIRE(one.ids == std::vector<int32_t>{9});
  REQUIRE_FALSE(one.finish.sequence_id.empty());
  const Generated two = node.Generate(Next(one, {5}));
  CHECK(two.ids.size() == kOutput);
  CHECK(two.finish.cached_tokens == 100);
  CHECK(node.Quiescent());
}

}  // namespace
}  // namespace sluice
