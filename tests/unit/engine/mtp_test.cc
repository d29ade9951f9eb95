// Tests drafts of the model's next-token layer, which the device makes behind the sampling of a
// step: they change no answer, they are often right, each is a function of its sequence alone, and
// a layer that fails costs its drafts only.
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "src/base/rng.h"
#include "src/engine/mtp_drafter.h"
#include "src/model/safetensors.h"
#include "tests/fixtures/fixtures.h"
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
using testing::kTinyVocab;
using testing::Node;
using testing::NodeOptions;

using Drafts = std::map<std::vector<int32_t>, std::vector<int32_t>>;  // by the tokens before them

NodeOptions Options(Drafter* drafter = nullptr, int drafts = 3) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-deepseek-mtp");
  options.max_context = 384;
  options.max_sequences = 4;
  options.chunk_tokens = 40;
  options.drafter = drafter;
  options.draft_tokens = drafter != nullptr ? drafts : 0;
  return options;
}

// Notes every draft of the device, and offers what a test wants of it.
class NotingDrafter : public Drafter {
 public:
  enum class Offer { kNone, kAll, kSomeWrong };
  explicit NotingDrafter(Offer offer) : offer_(offer) {}
  const char* name() const override { return "noting"; }
  bool on_device() const override { return true; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t) override {
    return std::make_unique<Sequence>(this);
  }
  Drafts noted;

 private:
  struct Sequence : SequenceDrafter {
    explicit Sequence(NotingDrafter* drafter) : all(drafter) {}
    void Follow(absl::Span<const int32_t> tokens) override { length = tokens.size(); }
    void Learn(absl::Span<const int32_t> tokens, absl::Span<const int32_t> drafts) override {
      behind = tokens.size();
      newest.assign(drafts.begin(), drafts.end());
      all->noted[{tokens.begin(), tokens.end()}] = newest;
    }
    bool Expects() const override { return all->offer_ != Offer::kNone; }
    void Propose(int most, std::vector<int32_t>* drafts) const override {
      drafts->clear();
      if (all->offer_ == Offer::kNone || behind != length) return;
      for (size_t i = 0; i < newest.size() && std::ssize(*drafts) < most; ++i) {
        const bool wrong = all->offer_ == Offer::kSomeWrong && (length + i) % 3 == 0;
        drafts->push_back(wrong ? (newest[i] + 1) % kTinyVocab : newest[i]);
      }
    }
    NotingDrafter* const all;
    size_t length = 0, behind = 0;
    std::vector<int32_t> newest;
  };
  const Offer offer_;
};

std::vector<Generated> All(Node& node, const std::vector<Request>& requests) {
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  std::vector<Generated> out;
  for (const auto& stream : streams) out.push_back(Node::Collect(*stream));
  return out;
}

TEST_CASE("drafts of a next-token layer change no answer and are often right") {
  SplitMix64 random(TestSeed());
  for (const std::string& model : fixtures::TinyDraftModels()) {
    NodeOptions options = Options();
    options.model_dir = fixtures::ModelDir(model);
    Node plain(options);
    std::vector<Request> requests;
    std::vector<Generated> want;
    uint32_t tokens = 0;
    for (int i = 0; i < 10; ++i) {
      requests.push_back(DrawRequest(random));
      if (i < 4) requests.back() = GreedyRequest(requests.back().prompt, 60);
      want.push_back(plain.Generate(requests.back()));
    }
    for (const auto& [drafts, bucket] : {std::pair{1, 0}, {2, 4}, {3, 0}, {3, 4}}) {
      const auto drafter = NewMtpDrafter();
      options.drafter = drafter.get();
      options.draft_tokens = drafts;
      options.row_bucket = bucket;
      Node node(options);
      const std::vector<Generated> got = All(node, requests);
      uint32_t drafted = 0, accepted = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        INFO(model << " request " << i << ", " << drafts << " drafts, bucket " << bucket);
        CheckSame(got[i], want[i]);
        if (i < 4) {
          drafted += got[i].finish.drafted_tokens;
          accepted += got[i].finish.accepted_tokens;
        }
        tokens += static_cast<uint32_t>(got[i].ids.size());
      }
      INFO(model << ": " << accepted << " of " << drafted << " drafts accepted");
      // By chance one in 512 would be. How many are depends on the prompts, which the seed draws.
      CHECK(drafted > 40);
      CHECK(accepted > drafted / 4);
      CHECK(node.metrics().dropped_drafts.Value() == 0);
      CHECK(node.Quiescent());
    }
    CHECK(tokens > 0);
  }
}

TEST_CASE("a draft depends on its sequence's tokens alone") {
  SplitMix64 random(TestSeed());
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) {
    // The formula's weights: their drafts are wrong, and no two are alike.
    requests.push_back(GreedyRequest(DrawPrompt(random), 40));
  }
  Drafts want;
  for (const auto offer : {NotingDrafter::Offer::kNone, NotingDrafter::Offer::kAll,
                           NotingDrafter::Offer::kSomeWrong}) {
    for (const auto& [chunk, bucket, together] :
         {std::tuple{40, 0, false}, {7, 0, true}, {40, 4, true}}) {
      NotingDrafter drafter(offer);
      NodeOptions options = Options(&drafter);
      options.load_format = "dummy";
      options.model_dir = fixtures::SourceDir("tiny-deepseek-mtp");
      options.chunk_tokens = chunk;
      options.row_bucket = bucket;
      Node node(options);
      if (together) {
        All(node, requests);
      } else {
        for (const Request& request : requests) node.Generate(request);
      }
      REQUIRE(node.Quiescent());
      if (want.empty()) want = drafter.noted;
      size_t compared = 0;
      for (const auto& [tokens, drafts] : drafter.noted) {
        REQUIRE(drafts.size() == 3);
        const auto same = want.find(tokens);
        if (same == want.end()) continue;
        CHECK(same->second == drafts);
        ++compared;
      }
      CHECK(compared >= drafter.noted.size());
      CHECK(compared > 150);
    }
  }
}

TEST_CASE("there are no drafts where a context ends") {
  NotingDrafter drafter(NotingDrafter::Offer::kAll);
  NodeOptions options = Options(&drafter);
  options.max_context = 64;
  Node node(options), plain([&] {
    NodeOptions without = options;
    without.drafter = nullptr;
    without.draft_tokens = 0;
    return without;
  }());
  const Request request = GreedyRequest({1, 2, 3, 4}, 60);
  CheckSame(node.Generate(request), plain.Generate(request));
  // The drafts of a token lie behind it, in the same history.
  for (const auto& [tokens, drafts] : drafter.noted) {
    CHECK(drafts.size() == (tokens.size() + 3 <= 64 ? 3u : 0u));
  }
}

TEST_CASE("a preempted and a kept sequence go on after drafts as they do without") {
  SplitMix64 random(TestSeed());
  NodeOptions options = Options();
  options.overcommit = 3;
  Node plain(options);
  std::vector<Request> requests;
  std::vector<Generated> want;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(DrawRequest(random));
    requests.back().sampling.max_tokens = 200;
    requests.back().sampling.stop_token_ids.clear();
    want.push_back(plain.Generate(requests.back()));
  }
  const auto drafter = NewMtpDrafter();
  options.drafter = drafter.get();
  options.draft_tokens = 3;
  // HBM holds about two sequences of this length.
  int64_t block = 0;
  for (const CacheKind& kind : plain.model().cache_layout().kinds) block += kind.page_bytes();
  options.hbm_bytes = block * plain.model().cache_layout().layers * 20;
  Node node(options);
  const std::vector<Generated> got = All(node, requests);
  for (size_t i = 0; i < got.size(); ++i) CheckSame(got[i], want[i]);
  CHECK(node.metrics().preemptions.Value() > 0);

  Request first = GreedyRequest(DrawPrompt(random), 30);
  first.keep = absl::Seconds(30);
  Request second = GreedyRequest(DrawPrompt(random), 30);
  std::vector<int32_t> ids;
  uint32_t accepted = 0;
  for (Node* of : {&plain, &node}) {
    second.handoff.sequence_id = of->Generate(first).finish.sequence_id;
    REQUIRE_FALSE(second.handoff.sequence_id.empty());
    const Generated last = of->Generate(second);
    if (of == &plain) ids = last.ids;
    CHECK(last.ids == ids);
    accepted = last.finish.accepted_tokens;
  }
  CHECK(accepted > 5);
  CHECK(node.Quiescent());
}

TEST_CASE("drafts that are not finite are dropped and counted, and no sequence ends by them") {
  // A norm of the next-token layer's head that is NaN makes its logits so.
  const fixtures::TempDir dir;
  REQUIRE(fixtures::WriteModel("tiny-deepseek-mtp", dir.path()).ok());
  const std::string path = dir.File("model.safetensors");
  std::string bytes = fixtures::ReadFile(path).value();
  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  const TensorInfo* const norm = (*file)->Find("model.layers.3.shared_head.norm.weight");
  REQUIRE(norm != nullptr);
  // The file is little-endian bf16.
  for (uint64_t at = norm->offset; at < norm->offset + norm->bytes; at += 2) {
    bytes[at] = '\xC0';
    bytes[at + 1] = '\x7F';
  }
  REQUIRE(fixtures::WriteFile(path, bytes).ok());
  const Request request = GreedyRequest({7, 1, 3}, 20);
  const Generated want = Node(Options()).Generate(request);
  const auto drafter = NewMtpDrafter();
  NodeOptions options = Options(drafter.get());
  options.model_dir = dir.path();
  Node node(options);
  const Generated got = node.Generate(request);
  CheckSame(got, want);
  CHECK(got.finish.drafted_tokens == 0);
  CHECK(node.metrics().dropped_drafts.Value() == 20 - 1);
}

}  // namespace
}  // namespace sluice
