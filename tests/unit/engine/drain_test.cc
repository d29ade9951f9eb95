// Draining and resuming an engine.
#include <catch2/catch.hpp>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/manual_clock.h"
#include "src/engine/engine.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

NodeOptions Options() {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 1024;
  return options;
}

const std::vector<int32_t> kPrompt = {1, 7, 9, 30};

absl::Status Ended() { return WithReason(absl::UnavailableError("drained"), "DRAINING"); }

absl::Status Submit(Node& node) {
  Request request = GreedyRequest(kPrompt, 5);
  request.request_id = "asked";
  request.sink = std::make_shared<TokenStream>(64);
  return node.engine().Submit(std::move(request)).status();
}

TEST_CASE("a draining engine refuses, finishes what runs, and says when it is idle") {
  Node node(Options());
  const auto running = node.Start(GreedyRequest(kPrompt, 200));
  // Its transfer has not begun and never will.
  Request expecting = GreedyRequest({}, 5);
  expecting.handoff.rendezvous_key = "never";
  const auto waiting = node.Start(std::move(expecting));
  absl::Notification idle;
  node.engine().Drain(absl::InfiniteFuture(), Ended(), [&] { idle.Notify(); });
  CHECK(ReasonOf(Submit(node)) == "DRAINING");
  CHECK(absl::IsUnavailable(Node::Collect(*waiting).finish.status));
  CHECK(Node::Collect(*running).ids.size() == 200);
  CHECK(idle.WaitForNotificationWithTimeout(absl::Seconds(10)));
  CHECK(node.Quiescent());
}

TEST_CASE("what the time to drain does not finish ends with its reason, once") {
  ManualClock clock;
  NodeOptions options = Options();
  options.clock = &clock;
  options.run_engine = false;
  options.max_sequences = 1;
  Node node(options);
  const auto turn = [&](int times) {
    for (int i = 0; i < times; ++i) {
      const Engine::Next next = node.engine().Turn();
      if (next.kind == Engine::Next::Kind::kEvent) next.event->Wait();
    }
  };
  const auto running = node.Start(GreedyRequest(kPrompt, 900));
  const auto waiting = node.Start(GreedyRequest(kPrompt, 900));
  turn(20);
  node.engine().Drain(clock.Now() + absl::Seconds(10), Ended(), nullptr);
  turn(20);
  CHECK_FALSE(running->Read().finish.has_value());
  // A second drain counts the time anew.
  clock.Advance(absl::Seconds(9));
  node.engine().Drain(clock.Now() + absl::Seconds(10), Ended(), nullptr);
  turn(5);
  clock.Advance(absl::Seconds(9));
  turn(5);
  CHECK_FALSE(running->Read().finish.has_value());
  SECTION("to its end") {
    clock.Advance(absl::Seconds(1));
    turn(10);
    for (const auto& stream : {running, waiting}) {
      const Generated got = Node::Collect(*stream);
      CHECK(absl::IsUnavailable(got.finish.status));
      CHECK(ReasonOf(got.finish.status) == "DRAINING");
    }
    CHECK(ReasonOf(Submit(node)) == "DRAINING");
    node.engine().Resume();
    CHECK(Submit(node).ok());
    turn(60);
  }
  SECTION("unless it is resumed meanwhile") {
    node.engine().Resume();
    clock.Advance(absl::Seconds(100));
    turn(5);
    CHECK_FALSE(running->Read().finish.has_value());
    CHECK(Submit(node).ok());
    node.engine().Resume();  // nothing to do
    node.engine().CancelAll(absl::CancelledError("test"));
    turn(10);
    CHECK(absl::IsCancelled(Node::Collect(*running).finish.status));
    CHECK(absl::IsCancelled(Node::Collect(*waiting).finish.status));
  }
  CHECK(node.Quiescent());
}

}  // namespace
}  // namespace sluice
