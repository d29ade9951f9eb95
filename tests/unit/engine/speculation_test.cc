// Tests speculation on a real tiny model: whatever drafts come, a sequence gives the same tokens,
// ends in the same way and leaves the same caches behind as without.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "src/attention/forwarding_policy.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/rng.h"
#include "src/engine/ngram_drafter.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/guessing_drafter.h"
#include "tests/support/node.h"
#include "tests/test_main.h"
#include "tests/unit/engine/speculation_support.h"

namespace sluice {
namespace {

using testing::CheckSame;
using testing::DrawPrompt;
using testing::DrawRequest;
using testing::Generated;
using testing::GreedyRequest;
using testing::GuessingDrafter;
using testing::Node;
using testing::NodeOptions;
using testing::Whole;
using Reason = FinishInfo::Reason;

constexpr int kDrafts = 4;
constexpr int32_t kVocab = testing::kTinyVocab;

NodeOptions Options(Drafter* drafter = nullptr, int drafts = kDrafts) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 512;
  options.max_sequences = 4;
  options.drafter = drafter;
  options.draft_tokens = drafter != nullptr ? drafts : 0;
  return options;
}

// Keeps a copy of what a slot's pages hold when its sequence leaves: the keys and values of the
// tokens that the engine counts as cached, all of them but the last.
class PageWatch : public ForwardingPolicy {
 public:
  explicit PageWatch(AttentionPolicy* policy) : ForwardingPolicy(policy), policy_(policy) {}
  void Release(int slot) override {
    seen.push_back(BytesOf(slot, tokens));
    ForwardingPolicy::Release(slot);
  }
  int layers = 0;      // set by the test
  int64_t tokens = 0;  // set by the test
  std::vector<std::vector<uint8_t>> seen;

 private:
  std::vector<uint8_t> BytesOf(int slot, int64_t count) {
    auto& full = *static_cast<FullPolicy*>(policy_);
    std::vector<uint8_t> bytes;
    const kernels::PagedCache c = full.LayerCache(0);
    for (int layer = 0; layer < layers; ++layer) {
      const kernels::PagedCache cache = full.LayerCache(layer);
      const int64_t row = c.head_dim * SizeOf(c.type);
      for (int64_t token = 0; token < count; ++token) {
        for (int head = 0; head < c.kv_heads; ++head) {
          const auto* block = static_cast<const uint8_t*>(cache.base) +
                              HeadBlockOffset(cache, slot, token / c.block_tokens, head) +
                              token % c.block_tokens * row;
          for (const uint8_t* part : {block, block + c.block_tokens * row}) {
            bytes.insert(bytes.end(), part, part + row);
          }
        }
      }
    }
    return bytes;
  }
  AttentionPolicy* const policy_;
};

TEST_CASE("any drafts give the tokens, log-probabilities and ends of none") {
  SplitMix64 random(TestSeed());
  Node plain(Options());
  const int row_bucket = GENERATE(0, 4);
  for (const double right : {0.0, 0.6, 1.0}) {
    std::vector<Request> requests;
    std::vector<Generated> want;
    GuessingDrafter::Options guess;
    guess.seed = random();
    guess.vocab = kVocab;
    guess.right = right;
    for (int i = 0; i < 12; ++i) {
      requests.push_back(DrawRequest(random));
      want.push_back(plain.Generate(requests.back()));
      guess.known.push_back(Whole(requests.back(), want.back()));
    }
    GuessingDrafter drafter(guess);
    NodeOptions options = Options(&drafter);
    options.row_bucket = row_bucket;
    Node node(options);
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (const Request& request : requests) streams.push_back(node.Start(request));
    uint32_t drafted = 0, accepted = 0;
    for (size_t i = 0; i < streams.size(); ++i) {
      INFO("request " << i << ", right " << right);
      const Generated got = Node::Collect(*streams[i]);
      CheckSame(got, want[i]);
      drafted += got.finish.drafted_tokens;
      accepted += got.finish.accepted_tokens;
    }
    CHECK(drafted > 20);
    CHECK(accepted <= drafted);
    if (right == 1.0) CHECK(accepted > drafted / 2);
    if (right == 0.0) CHECK(accepted < drafted / 8);
    CHECK(node.Quiescent());
  }
}

TEST_CASE("what drafts have left behind when a sequence ends is as if there had been none") {
  SplitMix64 random(TestSeed());
  for (int round = 0; round < 12; ++round) {
    const Request request = DrawRequest(random);
    GuessingDrafter::Options guess;
    guess.seed = random();
    guess.vocab = kVocab;
    guess.right = 0.5;
    PageWatch* watch = nullptr;
    const auto watched = [&](AttentionPolicy* policy) {
      auto made = std::make_unique<PageWatch>(policy);
      watch = made.get();
      return made;
    };
    NodeOptions options = Options();
    options.watch = watched;
    options.prefix_cache = false;  // so that a sequence leaves by Release
    std::vector<uint8_t> pages;
    Generated want;
    // The first run tells how many tokens there are.
    for (int run = 0; run < 2; ++run) {
      Node plain(options);
      watch->layers = plain.model().cache_layout().layers;
      watch->tokens = run == 0 ? 0 : std::ssize(Whole(request, want)) - 1;
      want = plain.Generate(request);
      REQUIRE(plain.Quiescent());
      pages = watch->seen.at(0);
    }
    guess.known = {Whole(request, want)};
    GuessingDrafter drafter(guess);
    options.drafter = &drafter;
    options.draft_tokens = 1 + static_cast<int>(random.Below(15));
    Node node(options);
    watch->layers = node.model().cache_layout().layers;
    watch->tokens = std::ssize(guess.known[0]) - 1;
    const Generated got = node.Generate(request);
    CheckSame(got, want);
    REQUIRE(node.Quiescent());
    REQUIRE(watch->seen.at(0).size() == pages.size());
    CHECK(watch->seen[0] == pages);
    CHECK(node.metrics().tokens(TokenKind::kOutput).Value() == static_cast<double>(got.ids.size()));
    CHECK(node.metrics().decoded_tokens(true).Value() == static_cast<double>(got.ids.size()));
    CHECK(node.metrics().tokens(TokenKind::kPrompt).Value() ==
          static_cast<double>(request.prompt.size() - 1));
  }
}

TEST_CASE("sampled tokens have the model's distribution, with drafts as without") {
  // The first two output tokens of many seeds, over a vocabulary of the few tokens that top_k and
  // a high bias leave. Drafts of the second token are a fixed guess, so that it is accepted with
  // its own probability.
  class FixedDrafter : public Drafter {
   public:
    const char* name() const override { return "fixed"; }
    std::unique_ptr<SequenceDrafter> Begin(int64_t) override { return std::make_unique<Fixed>(); }
    struct Fixed : SequenceDrafter {
      void Follow(absl::Span<const int32_t>) override {}
      bool Expects() const override { return true; }
      void Propose(int most, std::vector<int32_t>* drafts) const override {
        drafts->assign(static_cast<size_t>(std::min(most, 2)), 3);
      }
    };
  };
  constexpr int kSeeds = 600, kTokens = 4;
  FixedDrafter drafter;
  Node node(Options(&drafter)), plain(Options());
  std::map<std::vector<int32_t>, int> drawn;
  uint32_t drafted = 0, accepted = 0;
  Request request = GreedyRequest({3, 7, 5, 3, 2}, 4);
  request.sampling.temperature = 1.5f;
  for (uint32_t t = 0; t < kTokens; ++t) request.sampling.logit_bias.emplace_back(t, 60.0f);
  // The exact probability of each token behind each history comes from raw log-probabilities, to
  // which the bias is equal.
  request.sampling.logprobs = 20;
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    request.sampling.seed = seed;
    streams.push_back(node.Start(request));
  }
  for (const auto& stream : streams) {
    const Generated got = Node::Collect(*stream);
    REQUIRE(got.ids.size() == 4);
    ++drawn[{got.ids[1], got.ids[2]}];
    drafted += got.finish.drafted_tokens;
    accepted += got.finish.accepted_tokens;
  }
  CHECK(accepted > kSeeds / 10);
  CHECK(accepted < drafted);
  // The expected counts come from other seeds without speculation, ten times as many.
  std::map<std::vector<int32_t>, int> expected;
  constexpr int kMore = 10;
  streams.clear();
  for (uint64_t seed = 1; seed <= kSeeds * kMore; ++seed) {
    request.sampling.seed = 1'000'000 + seed;
    streams.push_back(plain.Start(request));
    if (streams.size() < 500) continue;
    for (const auto& stream : streams) {
      const Generated got = Node::Collect(*stream);
      ++expected[{got.ids[1], got.ids[2]}];
    }
    streams.clear();
  }
  double chi_square = 0;
  int cells = 0;
  for (const auto& [pair, count] : expected) {
    if (count < 5 * kMore) continue;
    const double want = static_cast<double>(count) / kMore;
    const double off = drawn[pair] - want;
    // The expectation is itself drawn, which adds a tenth to the variance.
    chi_square += off * off / (want * (1 + 1.0 / kMore));
    ++cells;
  }
  REQUIRE(cells >= 6);
  // The mean is below `cells`, and five standard deviations above it are not reached by chance.
  INFO("chi-square " << chi_square << " of " << cells << " cells");
  CHECK(chi_square < cells + 5 * std::sqrt(2.0 * cells));
}

// The engine's thread alone may read its times.
uint64_t StepsOf(Node& node) {
  uint64_t steps = 0;
  absl::Notification told;
  node.engine().Snapshot([&](const EngineSnapshot&) {
    steps = node.engine().times().steps;
    told.Notify();
  });
  told.WaitForNotification();
  return steps;
}

TEST_CASE("the lookup drafter speeds up a text that repeats, and counts what it did") {
  const auto drafter = NewNgramDrafter();
  Node node(Options(drafter.get())), plain(Options());
  // Strong bias makes the model repeat one token.
  Request request = GreedyRequest({4, 9, 2, 4, 9}, 100);
  request.sampling.logit_bias = {{9, 80.0f}};
  const Generated want = plain.Generate(request), got = node.Generate(request);
  CheckSame(got, want);
  CHECK(got.finish.accepted_tokens > 60);
  CHECK(StepsOf(node) < StepsOf(plain) / 2);
  const std::string text = node.metrics().Render();
  const auto value = [&](const std::string& name) {
    const size_t at = text.find("\n" + name + " ");
    REQUIRE(at != std::string::npos);
    return std::stod(text.substr(at + name.size() + 2));
  };
  CHECK(value("vllm:spec_decode_num_draft_tokens_total") == got.finish.drafted_tokens);
  CHECK(value("vllm:spec_decode_num_accepted_tokens_total") == got.finish.accepted_tokens);
  double by_position = 0;
  for (int position = 0; position < kDrafts; ++position) {
    by_position += value(absl::StrCat(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"", position, "\"}"));
  }
  CHECK(by_position == got.finish.accepted_tokens);
  CHECK(value("vllm:spec_decode_num_drafts_total") * kDrafts >= got.finish.drafted_tokens);
}

TEST_CASE("a kept sequence goes on after drafts as it does without") {
  SplitMix64 random(TestSeed());
  Node plain(Options());
  for (int round = 0; round < 6; ++round) {
    Request first = DrawRequest(random);
    first.keep = absl::Seconds(30);
    const Generated want = plain.Generate(first);
    Request second = GreedyRequest(DrawPrompt(random), 20);
    second.handoff.sequence_id = want.finish.sequence_id;
    const std::vector<int32_t> after =
        second.handoff.sequence_id.empty() ? std::vector<int32_t>{} : plain.Generate(second).ids;
    GuessingDrafter::Options guess;
    guess.seed = random();
    guess.vocab = kVocab;
    guess.known = {Whole(first, want)};
    GuessingDrafter drafter(guess);
    Node node(Options(&drafter, 15));
    const Generated got = node.Generate(first);
    CheckSame(got, want);
    REQUIRE(got.finish.sequence_id.empty() == want.finish.sequence_id.empty());
    if (got.finish.sequence_id.empty()) continue;
    second.handoff.sequence_id = got.finish.sequence_id;
    CHECK(node.Generate(second).ids == after);
  }
}

TEST_CASE("a preempted sequence goes on after drafts as it does without") {
  SplitMix64 random(TestSeed());
  NodeOptions options = Options();
  options.max_context = 320;
  options.overcommit = 3;
  Node plain(options);
  std::vector<Request> requests;
  std::vector<Generated> want;
  GuessingDrafter::Options guess;
  guess.vocab = kVocab;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(DrawRequest(random));
    requests.back().sampling.max_tokens = 200;
    requests.back().sampling.stop_token_ids.clear();
    want.push_back(plain.Generate(requests.back()));
    guess.known.push_back(Whole(requests.back(), want.back()));
  }
  GuessingDrafter drafter(guess);
  // HBM holds about two sequences of this length.
  options.hbm_bytes =
      plain.model().cache_layout().kinds[0].page_bytes() * plain.model().cache_layout().layers * 20;
  options.drafter = &drafter;
  options.draft_tokens = kDrafts;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  for (size_t i = 0; i < streams.size(); ++i) CheckSame(Node::Collect(*streams[i]), want[i]);
  CHECK(node.metrics().preemptions.Value() > 0);
  CHECK(node.Quiescent());
}

TEST_CASE("a full stream is not given more tokens than it has room for") {
  GuessingDrafter::Options guess;
  guess.vocab = kVocab;
  guess.right = 1;
  Node plain(Options());
  const Request request = GreedyRequest({3, 1, 4, 1, 5}, 60);
  const Generated want = plain.Generate(request);
  guess.known = {Whole(request, want)};
  GuessingDrafter drafter(guess);
  Node node(Options(&drafter, 8));
  for (const size_t capacity : {2, 3, 5}) {
    const auto stream = node.Start(request, capacity);
    CheckSame(Node::Collect(*stream), want);
  }
}

TEST_CASE("a policy that computes one row of a sequence refuses drafts by name") {
  class OneRow : public ForwardingPolicy {
   public:
    using ForwardingPolicy::ForwardingPolicy;
    int decode_rows_per_sequence() const override { return rows; }
    int rows = 1;
  };
  Node node(Options());
  OneRow policy(&node.policy());
  const absl::Status refused = CheckVerifies(policy, 3);
  CHECK(absl::IsInvalidArgument(refused));
  CHECK(refused.message().find("speculation: expected none with policy full") == 0);
  policy.rows = 3;
  CHECK(CheckVerifies(policy, 2).ok());
  CHECK(CheckVerifies(policy, 3).message().find("speculation_tokens: expected at most 2") == 0);
}

}  // namespace
}  // namespace sluice
