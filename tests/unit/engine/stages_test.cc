// Tests when a sequence says that it reached its stages, on a clock that the test moves.
#include <catch2/catch.hpp>

#include "src/base/crc32c.h"
#include "src/base/manual_clock.h"
#include "src/engine/engine.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr char kModel[] = "tiny-llama";

// A node with one place in its batch, whose engine turns when the test says so.
class Stage {
 public:
  Stage() : golden_((*fixtures::LoadGolden(kModel))[1]), node_(Options(&clock_)) {}

  void Turn(int times) {
    for (int i = 0; i < times; ++i) {
      const Engine::Next next = node_.engine().Turn();
      if (next.kind == Engine::Next::Kind::kEvent) next.event->Wait();
    }
  }
  // Hands the golden prompt over under a key.
  void HandOver(const std::string& key) {
    const auto context = static_cast<uint32_t>(golden_.prompt.size());
    Manifest manifest = node_.MakeManifest(golden_.prompt, context, 6);
    manifest.rendezvous_key = key;
    const auto reserved = node_.transfers().Reserve(manifest);
    REQUIRE(reserved.ok());
    for (uint32_t layer = 0; layer < golden_.k.size(); ++layer) {
      const std::vector<uint8_t> payload =
          node_.ChunkPayload(golden_.k[layer], golden_.v[layer], 0, context);
      const ChunkHeader header{reserved->transfer_id, layer, "kv", 0, 2, 0, context,
                               Crc32c(payload)};
      REQUIRE(node_.Land(header, payload).ok());
    }
    REQUIRE(node_.transfers().Commit(reserved->transfer_id, {}, nullptr).ok());
  }

  ManualClock clock_;
  const fixtures::GoldenCase golden_;
  Node node_;

 private:
  static NodeOptions Options(ManualClock* clock) {
    NodeOptions options;
    options.model_dir = fixtures::ModelDir(kModel);
    options.max_context = 1024;
    options.max_sequences = 1;
    options.run_engine = false;
    options.clock = clock;
    return options;
  }
};

// Has a sequence in the only place, and another that became ready after 3 s and waits since.
std::shared_ptr<TokenStream> Waiting(Stage& stage) {
  Request first = GreedyRequest(stage.golden_.prompt, 900);
  first.request_id = "runs";
  stage.node_.Start(std::move(first));
  stage.Turn(3);
  Request second = GreedyRequest({}, 6);
  second.request_id = "waits";
  second.handoff.rendezvous_key = "room";
  const auto stream = stage.node_.Start(std::move(second));
  stage.Turn(2);
  stage.clock_.Advance(absl::Seconds(3));
  stage.HandOver("room");
  stage.Turn(2);
  stage.clock_.Advance(absl::Seconds(2));
  stage.Turn(2);
  REQUIRE_FALSE(stream->Finished());
  return stream;
}

TEST_CASE("a sequence says when it was ready, admitted and in its first step") {
  Stage stage;
  const auto stream = Waiting(stage);
  stage.node_.engine().CancelRequest("runs", absl::CancelledError("makes room"), [](bool) {});
  stage.Turn(40);
  const FinishInfo end = Node::Collect(*stream).finish;
  CHECK(end.reason == FinishInfo::Reason::kLength);
  CHECK(end.stages.ready == absl::Seconds(3));
  CHECK(end.stages.admitted == absl::Seconds(5));
  CHECK(end.stages.stepped == absl::Seconds(5));
  CHECK(end.queued == absl::Seconds(2));
  CHECK(end.first_token == absl::Seconds(5));
}

TEST_CASE("a sequence that is never admitted says so") {
  Stage stage;
  const auto stream = Waiting(stage);
  stage.node_.engine().CancelRequest("waits", absl::CancelledError("gone"), [](bool) {});
  stage.Turn(5);
  const FinishInfo end = Node::Collect(*stream).finish;
  CHECK(absl::IsCancelled(end.status));
  CHECK(end.stages.ready == absl::Seconds(3));
  CHECK(end.stages.admitted == absl::InfiniteDuration());
  CHECK(end.stages.stepped == absl::InfiniteDuration());
  CHECK(end.total == absl::Seconds(5));
  stage.node_.engine().CancelAll(absl::CancelledError("test"));
  stage.Turn(5);
}

}  // namespace
}  // namespace sluice
