// Tests the engine on a real tiny model: joining, leaving, handoffs and every way to end.
// tests/parity checks what it computes.
#include "src/engine/engine.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/eventually.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using Reason = FinishInfo::Reason;

constexpr char kModel[] = "tiny-llama";

NodeOptions Options() {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  return options;
}

const fixtures::GoldenCase& Golden(size_t c = 1) {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[c];
}

OutputToken TokenOf(int32_t id) {
  OutputToken token;
  token.id = id;
  return token;
}

// Pushes the first `context` tokens of the golden prompt's caches.
std::string PushGolden(Node& node, uint32_t context, uint32_t max_new_tokens,
                       std::vector<OutputToken> first = {}, size_t c = 1) {
  const fixtures::GoldenCase& g = Golden(c);
  return node.Push(g.prompt, context, max_new_tokens, g.k, g.v, std::move(first));
}

Request ById(const std::string& transfer_id, uint32_t max_tokens) {
  Request request = GreedyRequest({}, max_tokens);
  request.handoff.transfer_id = transfer_id;
  return request;
}

absl::Status SubmitStatus(Node& node, Request request) {
  request.request_id = request.request_id.empty() ? "x" : request.request_id;
  request.sink = std::make_shared<TokenStream>(64);
  return node.engine().Submit(std::move(request)).status();
}

TEST_CASE("any part of the prompt may be handed over: the rest is pending") {
  NodeOptions options = Options();
  options.row_bucket = GENERATE(0, 4);
  Node node(options);
  const fixtures::GoldenCase& g = Golden(2);
  const std::vector<int32_t> want = node.Generate(GreedyRequest(g.prompt, 12)).ids;
  for (const uint32_t context : {1u, 31u, 32u, 33u, 200u, 256u, 257u}) {
    INFO("context " << context);
    const std::string id = PushGolden(node, context, 12, {}, 2);
    const Generated got = node.Generate(ById(id, 12));
    CHECK(got.finish.cached_tokens == context);
    CHECK(got.finish.prompt_tokens == g.prompt.size());
    CHECK(got.ids.front() == g.tokens.front());
    CHECK(got.ids.size() == 12);
  }
  CHECK(want.front() == g.tokens.front());
  CHECK(node.Quiescent());
}

TEST_CASE("a handed-over first token is emitted first and continued from") {
  NodeOptions options = Options();
  options.row_bucket = GENERATE(0, 4);
  Node node(options);
  const fixtures::GoldenCase& g = Golden();
  const auto context = static_cast<uint32_t>(g.prompt.size());
  const std::vector<int32_t> without = node.Generate(ById(PushGolden(node, context, 8), 8)).ids;
  const Generated with =
      node.Generate(ById(PushGolden(node, context, 8, {TokenOf(without[0])}), 8));
  CHECK(with.ids == without);
  CHECK(with.finish.completion_tokens == 8);
  // Several first tokens, and none left to compute.
  const Generated all =
      node.Generate(ById(PushGolden(node, context, 3, {TokenOf(9), TokenOf(8), TokenOf(7)}), 3));
  CHECK(all.ids == std::vector<int32_t>{9, 8, 7});
  CHECK(all.finish.reason == Reason::kLength);
  // One of them ends the sequence.
  Request stopping = ById(PushGolden(node, context, 8, {TokenOf(9), TokenOf(5), TokenOf(7)}), 8);
  stopping.sampling.stop_token_ids = {5};
  const Generated stopped = node.Generate(std::move(stopping));
  CHECK(stopped.ids == std::vector<int32_t>{9, 5});
  CHECK(stopped.finish.reason == Reason::kStop);
  CHECK(stopped.finish.stop_token_id == 5);
  CHECK(node.Quiescent());
}

TEST_CASE("a stop id ends a sequence with it, min_tokens keeps it away") {
  Node node(Options());
  const std::vector<int32_t> free = node.Generate(GreedyRequest(Golden().prompt, 10)).ids;
  Request request = GreedyRequest(Golden().prompt, 10);
  request.sampling.stop_token_ids = {static_cast<uint32_t>(free[3])};
  const Generated stopped = node.Generate(request);
  CHECK(stopped.finish.reason == Reason::kStop);
  CHECK(stopped.finish.stop_token_id == free[3]);
  CHECK(stopped.ids.back() == free[3]);
  CHECK(stopped.ids.size() <= 4);
  request.sampling.min_tokens = 6;
  const Generated later = node.Generate(request);
  CHECK(later.ids.size() > 6);
  for (size_t i = 0; i < 6; ++i) CHECK(later.ids[i] != free[3]);
  // EOS is such an id unless it is ignored.
  Request eos = GreedyRequest(Golden().prompt, 10);
  eos.sampling.logit_bias = {{2, 100.0f}};
  CHECK(node.Generate(eos).ids.size() == 10);
  eos.sampling.ignore_eos = false;
  CHECK(node.Generate(eos).ids == std::vector<int32_t>{2});
  CHECK(node.Quiescent());
}

TEST_CASE("a stop string ends a sequence at the token that completes it") {
  // The test's tokenizer writes token i as <i>, so that any text is easy to foresee.
  const fixtures::TempDir dir;
  std::filesystem::copy(fixtures::ModelDir(kModel), dir.path(),
                        std::filesystem::copy_options::recursive);
  std::string vocab;
  for (int i = 0; i < 512; ++i) absl::StrAppend(&vocab, i == 0 ? "" : ",", "\"<", i, ">\":", i);
  REQUIRE(fixtures::WriteFile(
              dir.File("tokenizer.json"),
              absl::StrCat(R"({"added_tokens":[],"decoder":{"type":"ByteLevel"},)",
                           R"("model":{"type":"BPE","merges":[],"vocab":{)", vocab, "}}}"))
              .ok());
  NodeOptions options = Options();
  options.model_dir = dir.path();
  Node node(options);
  const std::vector<int32_t> free = node.Generate(GreedyRequest(Golden().prompt, 10)).ids;
  Request request = GreedyRequest(Golden().prompt, 10);
  const std::string text = absl::StrCat(free[2], "><", free[3]);
  request.sampling.stop = {"nothing of the kind", text};
  const Generated got = node.Generate(std::move(request));
  CHECK(got.finish.reason == Reason::kStop);
  CHECK(got.finish.stop_string == text);
  CHECK(got.ids == std::vector<int32_t>(free.begin(), free.begin() + 4));
  CHECK(node.Quiescent());
}

TEST_CASE("more sequences than slots, and than HBM holds, all finish as if alone") {
  NodeOptions options = Options();
  options.max_sequences = 4;
  options.row_bucket = GENERATE(0, 1, 3);
  // HBM for about two of them at a time.
  options.hbm_bytes = 3 * 2 * (2 * 64 * 2 * 2) * 192 + 8192;
  Node node(options);
  const std::vector<int32_t> want = node.Generate(GreedyRequest(Golden().prompt, 40)).ids;
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 12; ++i) streams.push_back(node.Start(GreedyRequest(Golden().prompt, 40)));
  for (const auto& stream : streams) CHECK(Node::Collect(*stream).ids == want);
  CHECK(node.Quiescent());
}

TEST_CASE(
    "cancel, deadline and a vanished transfer end a sequence once, and its memory comes back") {
  NodeOptions options = Options();
  options.max_sequences = 2;
  SECTION("its transfer never comes") {
    options.transfer_wait = absl::Milliseconds(200);
    Node node(options);
    Request request = GreedyRequest({}, 5);
    request.handoff.rendezvous_key = "nobody";
    const Generated got = node.Generate(std::move(request));
    CHECK(absl::IsDeadlineExceeded(got.finish.status));
    CHECK(ReasonOf(got.finish.status) == "TRANSFER_WAIT");
    return;
  }
  Node node(options);
  const auto cancel = [&](const std::string& id) {
    absl::Notification done;
    bool was_there = false;
    node.engine().CancelRequest(id, absl::CancelledError("by test"), [&](bool found) {
      was_there = found;
      done.Notify();
    });
    done.WaitForNotification();
    return was_there;
  };
  SECTION("running") {
    Request request = GreedyRequest(Golden().prompt, 900);
    request.request_id = "long";
    const auto stream = node.Start(std::move(request));
    while (stream->Read().tokens.empty()) absl::SleepFor(absl::Milliseconds(1));
    CHECK(cancel("long"));
    CHECK(absl::IsCancelled(Node::Collect(*stream).finish.status));
    CHECK_FALSE(cancel("long"));
  }
  SECTION("waiting for a slot") {
    const auto a = node.Start(GreedyRequest(Golden().prompt, 900));
    const auto b = node.Start(GreedyRequest(Golden().prompt, 900));
    Request request = GreedyRequest(Golden().prompt, 5);
    request.request_id = "waiting";
    const auto stream = node.Start(std::move(request));
    CHECK(cancel("waiting"));
    CHECK(absl::IsCancelled(Node::Collect(*stream).finish.status));
    node.engine().CancelAll(absl::CancelledError("all"));
    CHECK(absl::IsCancelled(Node::Collect(*a).finish.status));
    CHECK(absl::IsCancelled(Node::Collect(*b).finish.status));
  }
  SECTION("deadline") {
    Request request = GreedyRequest(Golden().prompt, 900);
    request.deadline = absl::Now() + absl::Milliseconds(30);
    CHECK(absl::IsDeadlineExceeded(node.Generate(std::move(request)).finish.status));
  }
  SECTION("its transfer is aborted") {
    const auto reserved = node.transfers().Reserve(node.MakeManifest(Golden().prompt, 1, 5));
    REQUIRE(reserved.ok());
    const auto stream = node.Start(ById(reserved->transfer_id, 5));
    REQUIRE(node.transfers().Abort(reserved->transfer_id, "test").ok());
    CHECK(ReasonOf(Node::Collect(*stream).finish.status) == "TRANSFER_ABORTED");
  }
  SECTION("its caller goes while the transfer is under way") {
    const auto reserved = node.transfers().Reserve(node.MakeManifest(Golden().prompt, 1, 5));
    REQUIRE(reserved.ok());
    Request request = ById(reserved->transfer_id, 5);
    request.request_id = "gone";
    const auto stream = node.Start(std::move(request));
    CHECK(cancel("gone"));
    CHECK(absl::IsCancelled(Node::Collect(*stream).finish.status));
    CHECK(absl::IsNotFound(node.transfers().Get(reserved->transfer_id, 1).status()));
  }
  CHECK(node.Quiescent());
}

TEST_CASE("a Generate waits for its transfer by key, and for its commit") {
  Node node(Options());
  const fixtures::GoldenCase& g = Golden();
  const auto context = static_cast<uint32_t>(g.prompt.size());
  Request request = GreedyRequest({}, 6);
  request.handoff.rendezvous_key = "room 7";
  const auto stream = node.Start(std::move(request));
  Manifest manifest = node.MakeManifest(g.prompt, context, 6);
  manifest.rendezvous_key = "room 7";
  const auto reserved = node.transfers().Reserve(manifest);
  REQUIRE(reserved.ok());
  for (uint32_t layer = 0; layer < g.k.size(); ++layer) {
    const std::vector<uint8_t> payload = node.ChunkPayload(g.k[layer], g.v[layer], 0, context);
    ChunkHeader header{reserved->transfer_id, layer, "kv", 0, 2, 0, context, Crc32c(payload)};
    REQUIRE(node.Land(header, payload).ok());
  }
  absl::SleepFor(absl::Milliseconds(20));
  CHECK(stream->Read().tokens.empty());
  REQUIRE(node.transfers().Commit(reserved->transfer_id, {}, nullptr).ok());
  CHECK(Node::Collect(*stream).ids == std::vector<int32_t>(g.tokens.begin(), g.tokens.begin() + 6));
  CHECK(node.Quiescent());
}

EngineSnapshot SnapshotOf(Node& node) {
  absl::Notification done;
  EngineSnapshot snapshot;
  node.engine().Snapshot([&](EngineSnapshot s) {
    snapshot = std::move(s);
    done.Notify();
  });
  done.WaitForNotification();
  return snapshot;
}

TEST_CASE("the engine knows where the time of its steps goes") {
  Node node(Options());
  node.Generate(GreedyRequest(Golden().prompt, 20));
  const StepTimes times = SnapshotOf(node).times;
  // The prompt's step chooses the first token; the last step's sums may still be under way.
  CHECK(times.steps >= 19);
  CHECK(times.step > absl::ZeroDuration());
  CHECK(times.plan > absl::ZeroDuration());
  CHECK(times.launch > absl::ZeroDuration());
  CHECK(times.emit > absl::ZeroDuration());
  CHECK(times.turn >= times.plan + times.launch + times.emit);
}

TEST_CASE("a slow reader is parked, the others go on, and it loses nothing when it reads again") {
  Node node(Options());
  const std::vector<int32_t> want = node.Generate(GreedyRequest(Golden().prompt, 100)).ids;
  const auto slow = node.Start(GreedyRequest(Golden().prompt, 100), /*capacity=*/16);
  CHECK(node.Generate(GreedyRequest(Golden().prompt, 100)).ids == want);
  const EngineSnapshot snapshot = SnapshotOf(node);
  REQUIRE(snapshot.sequences.size() == 1);
  CHECK(snapshot.sequences[0].state == SequenceSnapshot::State::kParked);
  CHECK(snapshot.sequences[0].output_tokens <= 16);
  CHECK(Node::Collect(*slow).ids == want);
  CHECK(node.Quiescent());
}

TEST_CASE("a reader that never reads ends with SLOW_READER, after what was emitted") {
  NodeOptions options = Options();
  options.slow_reader_timeout = absl::Milliseconds(100);
  Node node(options);
  const auto slow = node.Start(GreedyRequest(Golden().prompt, 100), /*capacity=*/16);
  REQUIRE(
      testing::Eventually(absl::Seconds(10), [&] { return SnapshotOf(node).sequences.empty(); }));
  const Generated got = Node::Collect(*slow);
  CHECK(absl::IsAborted(got.finish.status));
  CHECK(ReasonOf(got.finish.status) == "SLOW_READER");
  CHECK(got.ids.size() == 16);
  CHECK(node.Quiescent());
}

TEST_CASE("a cache that is not finite ends its own sequence only") {
  const bool prefix_cache = GENERATE(true, false);
  NodeOptions options = Options();
  options.prefix_cache = prefix_cache;
  const fixtures::GoldenCase& g = Golden();
  const auto context = static_cast<uint32_t>(g.prompt.size());
  std::vector<int32_t> want;
  {
    Node other(options);  // so that the bad cache is the first of its prompt
    want = other.Generate(GreedyRequest(g.prompt, 60)).ids;
  }
  Node node(options);
  const auto good = node.Start(GreedyRequest(g.prompt, 60));
  std::vector<std::vector<uint16_t>> v = g.v;
  v[0][0] = FloatToBFloat16(std::numeric_limits<float>::quiet_NaN());
  const std::string id = node.Push(g.prompt, context, 5, g.k, v);
  const Generated bad = node.Generate(ById(id, 5));
  CHECK(absl::IsInternal(bad.finish.status));
  CHECK(bad.ids.empty());
  CHECK(Node::Collect(*good).ids == want);
  // The pages that held it poison no later sequence.
  CHECK(node.Generate(GreedyRequest(g.prompt, 60)).ids == want);
  CHECK(node.Quiescent());
}

TEST_CASE("prompt and output share the context") {
  Node node(Options());
  Request request = GreedyRequest(std::vector<int32_t>(1000, 3), 25);
  CHECK(FieldOf(SubmitStatus(node, request)) == "sampling.max_tokens");
  request.sampling.max_tokens = 24;
  CHECK(node.Generate(request).ids.size() == 24);
  CHECK(node.Quiescent());
}

TEST_CASE("what a request may not say is refused at the door, by field") {
  NodeOptions options = Options();
  options.hbm_bytes = 3 * 2 * (2 * 64 * 2 * 2) * 128 + 8192;
  Node node(options);
  Request request = GreedyRequest({}, 5);
  CHECK(FieldOf(SubmitStatus(node, request)) == "prompt_token_ids");
  request.prompt = {1, 2, 512};
  CHECK(FieldOf(SubmitStatus(node, request)) == "prompt_token_ids");
  request.prompt = {1, -1};
  CHECK(FieldOf(SubmitStatus(node, request)) == "prompt_token_ids");
  request.prompt.assign(1024, 3);
  CHECK(FieldOf(SubmitStatus(node, request)) == "prompt_token_ids");
  request.prompt.assign(1000, 3);  // fits the context, not the HBM
  CHECK(FieldOf(SubmitStatus(node, request)) == "prompt_token_ids");
  request.prompt.assign(200, 3);
  request.sampling.max_tokens = 100;
  CHECK(FieldOf(SubmitStatus(node, request)) == "sampling.max_tokens");
  request.sampling.max_tokens.reset();
  request.sampling.min_tokens = 3000000000u;
  CHECK(FieldOf(SubmitStatus(node, request)) == "sampling.min_tokens");
  // Without max_tokens a request gets as many as HBM leaves, and none behind it waits for ever.
  request.sampling.min_tokens = 0;
  const Generated most = node.Generate(request);
  CHECK(most.finish.reason == Reason::kLength);
  CHECK(most.ids.size() == 256 - 200);
  request = GreedyRequest({1, 2}, 5);
  request.sampling.stop = {"x"};  // no tokenizer.json
  CHECK(FieldOf(SubmitStatus(node, request)) == "sampling.stop");
  CHECK(absl::IsNotFound(SubmitStatus(node, ById("0123", 5))));

  const std::string id = PushGolden(node, 1, 5);
  CHECK(FieldOf(SubmitStatus(node, ById(id, 6))) == "sampling.max_tokens");
  Request unending = ById(id, 5);
  unending.sampling.max_tokens.reset();
  unending.sampling.min_tokens = 6;
  CHECK(FieldOf(SubmitStatus(node, unending)) == "sampling.min_tokens");
  Request other = ById(id, 5);
  other.prompt = {1, 2, 3};
  CHECK(FieldOf(SubmitStatus(node, other)) == "prompt_token_ids");
  const auto first = node.Start(ById(id, 5));
  // Its Generate is here, or has been, so a second one is refused.
  CHECK_FALSE(SubmitStatus(node, ById(id, 5)).ok());
  CHECK(Node::Collect(*first).ids.size() == 5);
  CHECK(node.Quiescent());
}

TEST_CASE("a request id is unique among the living, and local prefill is a choice of the node") {
  NodeOptions options = Options();
  options.local_prefill = LocalPrefill::kOnFailure;
  options.max_waiting = 1;
  Node node(options);
  const absl::Status status = SubmitStatus(node, GreedyRequest({1, 2}, 5));
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(ReasonOf(status) == "NO_HANDOFF");
  Request request = GreedyRequest({}, 5);
  request.request_id = "same";
  request.handoff.rendezvous_key = "k";
  const auto stream = node.Start(request);
  const absl::Status second = SubmitStatus(node, request);
  CHECK((absl::IsAlreadyExists(second) || absl::IsResourceExhausted(second)));
  request.request_id = "other";
  request.handoff.rendezvous_key = "k2";
  const absl::Status full = SubmitStatus(node, request);
  CHECK(absl::IsResourceExhausted(full));
  CHECK(RetryAfterOf(full).has_value());
  node.engine().CancelAll(absl::CancelledError("test"));
  Node::Collect(*stream);
  // The canary is always allowed.
  Request canary = GreedyRequest({1}, 2);
  canary.allow_local_prefill = true;
  CHECK(node.Generate(std::move(canary)).ids.size() == 2);
}

TEST_CASE("a prompt whose caches do not arrive is computed where the node may, and else ends") {
  const fixtures::GoldenCase& g = Golden(2);
  const auto tokens = static_cast<uint32_t>(g.prompt.size());
  const auto pulled = [&](Node& node, bool with_prompt) {
    const auto reserved = node.transfers().Reserve(node.MakeManifest(g.prompt, tokens, 12));
    REQUIRE(reserved.ok());
    Request request = ById(reserved->transfer_id, 12);
    if (with_prompt) request.prompt = g.prompt;
    const auto stream = node.Start(std::move(request));
    CHECK(node.transfers().Fail(reserved->transfer_id,
                                WithReason(absl::UnavailableError("gone"), "SOURCE_UNREACHABLE")));
    return Node::Collect(*stream);
  };
  NodeOptions options = Options();
  options.local_prefill = LocalPrefill::kOnFailure;
  options.transfer_wait = absl::Milliseconds(200);
  Node node(options);
  Node always(Options());
  const std::vector<int32_t> want = always.Generate(GreedyRequest(g.prompt, 12)).ids;
  CHECK(pulled(node, true).ids == want);
  // The same holds when the time to wait for a transfer is over.
  Request late = GreedyRequest(g.prompt, 12);
  late.handoff.rendezvous_key = "never";
  CHECK(node.Generate(std::move(late)).ids == want);
  CHECK(node.metrics().Render().find("sluice_local_prefills_total 2") != std::string::npos);
  // Without its prompt there is nothing to compute.
  CHECK(ReasonOf(pulled(node, false).finish.status) == "SOURCE_UNREACHABLE");
  CHECK(node.Quiescent());
  options.local_prefill = LocalPrefill::kNever;
  Node never(options);
  CHECK(ReasonOf(pulled(never, true).finish.status) == "SOURCE_UNREACHABLE");
  CHECK(never.Quiescent());
}

TEST_CASE("a sequence that ends while its caches are still on their way leaves nothing behind") {
  Node node(Options());
  const fixtures::GoldenCase& g = Golden(2);
  for (int round = 0; round < 50; ++round) {
    const std::string id =
        node.Push(g.prompt, static_cast<uint32_t>(g.prompt.size()), 50, g.k, g.v);
    Request request = ById(id, 50);
    request.request_id = absl::StrCat("brief", round);
    const auto stream = node.Start(request);
    node.engine().CancelRequest(request.request_id, absl::CancelledError("at once"), [](bool) {});
    Node::Collect(*stream);
  }
  CHECK(node.Quiescent());
  CHECK(node.Generate(GreedyRequest(g.prompt, 3)).ids ==
        std::vector<int32_t>(g.tokens.begin(), g.tokens.begin() + 3));
}

}  // namespace
}  // namespace sluice
