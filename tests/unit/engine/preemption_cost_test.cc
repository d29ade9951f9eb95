// Measures what overcommitted HBM costs in time. This is a program of its own, because it needs the
// machine to itself.
#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "src/engine/engine.h"
#include "tests/unit/engine/preemption_support.h"

namespace sluice {
namespace {

using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

struct Cost {
  double seconds = 0;
  uint64_t steps = 0;
  double preemptions = 0;
};

// Runs 16 sequences with a prompt of 33 tokens and 80 output tokens each.
Cost CostOf(double overcommit) {
  NodeOptions options = Options();
  options.overcommit = overcommit;
  options.hbm_bytes = 1536 * 600 + 8192;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  const absl::Time begin = absl::Now();
  for (int i = 0; i < 16; ++i) streams.push_back(node.Start(GreedyRequest(Golden(1).prompt, 80)));
  for (const auto& stream : streams) CHECK(Node::Collect(*stream).ids.size() == 80);
  Cost cost;
  cost.seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  cost.preemptions = node.metrics().preemptions.Value();
  absl::Notification there;
  node.engine().Snapshot([&](const EngineSnapshot& snapshot) {
    cost.steps = snapshot.times.steps;
    there.Notify();
  });
  there.WaitForNotification();
  return cost;
}

TEST_CASE("overcommitted memory does not slow a batch down, even where every sequence is long") {
  // The worst case: no sequence stops early, so every promise is called in. Other programs on the
  // machine change the time but not the steps, so the time may be taken again; no other test runs
  // beside this one.
  Cost plain = CostOf(1), twice = CostOf(2);
  for (int again = 0; again < 5 && twice.seconds > 1.5 * plain.seconds; ++again) {
    plain.seconds = std::min(plain.seconds, CostOf(1).seconds);
    twice.seconds = std::min(twice.seconds, CostOf(2).seconds);
  }
  WARN("overcommit 2 takes " << twice.steps << " steps and " << twice.seconds << " s, 1 "
                             << plain.steps << " and " << plain.seconds << "; " << twice.preemptions
                             << " preemptions");
  CHECK(plain.preemptions == 0);
  CHECK(twice.seconds <= 1.5 * plain.seconds);
  CHECK(static_cast<double>(twice.steps) <= 1.2 * static_cast<double>(plain.steps));
}

}  // namespace
}  // namespace sluice
