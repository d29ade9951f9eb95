// Many faults at once, on the real engine with its thread: every stream must end once, with the
// right tokens or the error of its own fault, and nothing may stay reserved.
#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr char kModel[] = "tiny-llama";
constexpr uint32_t kTokens = 24;
constexpr int kClients = 4;
constexpr int kRequestsEach = 6;

const fixtures::GoldenCase& Golden() {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[1];
}

// One client: transfers and Generates one after the other, each fault answered as a caller should.
// It runs on a thread of its own, where Catch2 may not check, so it notes what was wrong.
class Client {
 public:
  Client(Node* node, int number) : node_(node), number_(number) {}

  void Run(const std::vector<int32_t>& want) {
    for (int i = 0; i < kRequestsEach && wrong.empty(); ++i) One(i, want);
  }

  std::vector<std::string> wrong;
  int finished = 0;
  int bad_logits = 0;

 private:
  void One(int index, const std::vector<int32_t>& want) {
    const auto context = static_cast<uint32_t>(Golden().prompt.size());
    const Manifest manifest = node_->MakeManifest(Golden().prompt, context, kTokens);
    const auto reserved = Retry("DRAM_FULL", [&] { return node_->transfers().Reserve(manifest); });
    if (!reserved.ok()) return Note(reserved.status());
    // The Generate comes before the blocks or after them: the two legs meet.
    const bool early = index % 2 == 0;
    auto stream = early ? Submit(index, reserved->transfer_id) : nullptr;
    for (uint32_t layer = 0; layer < Golden().k.size(); ++layer) {
      const std::vector<uint8_t> payload =
          node_->ChunkPayload(Golden().k[layer], Golden().v[layer], 0, context);
      const ChunkHeader header{reserved->transfer_id, layer, "kv", 0, 2, 0, context,
                               Crc32c(payload)};
      const auto landed = Retry("CHECKSUM_MISMATCH", [&] { return node_->Land(header, payload); });
      if (!landed.ok()) Note(landed.status());
    }
    const auto committed = node_->transfers().Commit(reserved->transfer_id, {}, nullptr);
    if (!committed.ok()) Note(committed.status());
    if (!early) stream = Submit(index, reserved->transfer_id);
    if (stream == nullptr) return;
    const Generated got = Node::Collect(*stream);
    const bool prefix =
        got.ids.size() <= want.size() && std::equal(got.ids.begin(), got.ids.end(), want.begin());
    if (!prefix) wrong.push_back(absl::StrCat("foreign tokens: ", absl::StrJoin(got.ids, " ")));
    if (got.finish.reason == FinishInfo::Reason::kLength && got.ids == want) {
      ++finished;
    } else if (ReasonOf(got.finish.status) == "BAD_LOGITS") {
      ++bad_logits;
    } else {
      wrong.push_back(absl::StrCat(got.ids.size(), " tokens, then ",
                                   std::string(got.finish.status.ToString())));
    }
  }

  std::shared_ptr<TokenStream> Submit(int index, const std::string& transfer_id) {
    auto stream = std::make_shared<TokenStream>(8, [this] { node_->engine().Wake(); });
    const auto submitted = Retry("TOO_MANY_WAITING", [&] {
      Request request = GreedyRequest({}, kTokens);
      request.request_id = absl::StrCat("client-", number_, "-", index);
      request.handoff.transfer_id = transfer_id;
      request.sink = stream;
      return node_->engine().Submit(std::move(request));
    });
    if (submitted.ok()) return stream;
    Note(submitted.status());
    return nullptr;
  }

  // Calls `call` again while it is refused for `reason`, which its fault may cause.
  template <typename Call>
  auto Retry(const std::string& reason, const Call& call) -> decltype(call()) {
    auto result = call();
    for (int i = 0; i < 1000 && !result.ok() && ReasonOf(result.status()) == reason; ++i) {
      absl::SleepFor(absl::Milliseconds(1));
      result = call();
    }
    return result;
  }

  void Note(const absl::Status& status) { wrong.emplace_back(std::string(status.ToString())); }

  Node* const node_;
  const int number_;
};

TEST_CASE("a storm of faults ends no stream twice, mixes no tokens and leaks nothing") {
  if (!kFailpointsCompiledIn) return SkipTest("built without failpoints");
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 512;
  options.max_sequences = 3;
  options.row_bucket = GENERATE(0, 2);
  Node node(options);
  const auto context = static_cast<uint32_t>(Golden().prompt.size());
  Request first = GreedyRequest({}, kTokens);
  first.handoff.transfer_id = node.Push(Golden().prompt, context, kTokens, Golden().k, Golden().v);
  const std::vector<int32_t> want = node.Generate(std::move(first)).ids;
  REQUIRE(want.size() == kTokens);

  const std::string terms =
      "kv.reserve=error%0.2;kv.admit=error%0.5;kv.wake=error%0.5;kv.reap=error%0.5;"
      "kv.copy=delay(2ms)%0.5;ingest.checksum=error%0.2;ingest.landing=delay(200us)%0.2;"
      "engine.queue=error%0.2;engine.wake=error%0.3;engine.step=delay(2ms)%0.1;"
      "engine.logits=error%0.005;decode.sink=error%0.2";
  const uint64_t seed = TestSeed();
  std::vector<Client> clients;
  for (int i = 0; i < kClients; ++i) clients.emplace_back(&node, i);
  {
    const ScopedFailpoints armed(terms, seed);
    std::vector<std::jthread> threads;
    for (Client& client : clients) threads.emplace_back([&] { client.Run(want); });
  }
  int finished = 0, bad_logits = 0;
  for (const Client& client : clients) {
    INFO(absl::StrJoin(client.wrong, "\n"));
    CHECK(client.wrong.empty());
    finished += client.finished;
    bad_logits += client.bad_logits;
  }
  CHECK(finished + bad_logits == kClients * kRequestsEach);
  // A second fault may hit the step that was launched before the first one's step was read.
  const int faults = static_cast<int>(StateOf(Failpoint::kEngineLogits).fired);
  CHECK(bad_logits <= faults);
  CHECK((bad_logits > 0) == (faults > 0));
  CHECK(node.Quiescent());
  for (const char* sure : {"kv.admit", "kv.wake", "engine.wake", "decode.sink"}) {
    // Passed at least 24 times at 0.5, or hundreds of times at less, so zero faults is no
    // coincidence.
    const auto parsed = ParseFailpoints(absl::StrCat(sure, "=off"));
    INFO(sure);
    CHECK(StateOf(parsed->front().point).fired > 0);
  }
}

}  // namespace
}  // namespace sluice
