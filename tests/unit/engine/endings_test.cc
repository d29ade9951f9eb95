// Tests that each sequence ends once and everything is given back, however sequences end and
// whatever races.
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/manual_clock.h"
#include "src/base/rng.h"
#include "src/engine/engine.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using Reason = FinishInfo::Reason;

constexpr char kModel[] = "tiny-llama";
constexpr int64_t kTokenBytes = 1536;  // bytes of a token's caches in bf16

const fixtures::GoldenCase& Golden() {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[1];
}

NodeOptions Options() {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  return options;
}

int64_t Reserved(const PagePool& pool) { return pool.UsageOf(0).reserved_bytes; }

bool Empty(Node& node) {
  return Reserved(node.hbm()) == 0 && Reserved(node.dram()) == 0 &&
         node.hbm().UsageOf(0).used_bytes == 0 && node.dram().UsageOf(0).used_bytes == 0;
}

struct Reader {
  std::string name;
  std::shared_ptr<TokenStream> stream;
  bool reads = true;
  int finishes = 0;
  absl::Status status;

  void Read() {
    TokenStream::Batch batch = stream->Read();
    if (!batch.finish.has_value()) return;
    ++finishes;
    status = batch.finish->status;
  }
};

class Turner {
 public:
  explicit Turner(Node* node) : node_(node) {}
  void Turn(int times) {
    for (int i = 0; i < times; ++i) {
      const Engine::Next next = node_->engine().Turn();
      if (next.kind == Engine::Next::Kind::kEvent) next.event->Wait();
    }
  }

 private:
  Node* const node_;
};

TEST_CASE("after any mix of endings nothing is reserved and nothing is used") {
  SplitMix64 random(TestSeed());
  const auto chance = [&](uint64_t one_in) { return random.Below(one_in) == 0; };
  double preempted = 0;
  // Some seeds take more rounds until a sequence is preempted.
  for (int round = 0; round < 4 || (preempted == 0 && round < 30); ++round) {
    ManualClock clock;
    NodeOptions options = Options();
    options.clock = &clock;
    options.run_engine = false;
    options.max_sequences = 6;
    options.overcommit = round == 0 ? 1 : 3;
    options.hbm_bytes = kTokenBytes * 360 + 8192;
    options.dram_bytes = kTokenBytes * 3000 + 8192;
    options.transfer_wait = absl::Seconds(20);
    options.max_lease = absl::Seconds(15);
    options.slow_reader_timeout = absl::Seconds(5);
    Node node(options);
    Turner turner(&node);
    const fixtures::GoldenCase& g = Golden();
    const auto whole = static_cast<uint32_t>(g.prompt.size());
    std::vector<std::vector<uint16_t>> bad_v = g.v;
    bad_v[0][0] = FloatToBFloat16(std::numeric_limits<float>::quiet_NaN());
    std::vector<Reader> readers;
    int names = 0;
    const auto start = [&] {
      Reader reader;
      reader.name = absl::StrCat("s", names++);
      reader.reads = !chance(8);
      const auto tokens = static_cast<uint32_t>(1 + random.Below(160));
      Request request = GreedyRequest({}, tokens);
      request.request_id = reader.name;
      if (chance(6)) request.sampling.stop_token_ids = {static_cast<uint32_t>(random.Below(512))};
      if (chance(5)) {
        request.deadline = clock.Now() + absl::Milliseconds(100 + random.Below(5000));
      }
      if (chance(3)) {
        request.prompt = g.prompt;
      } else if (chance(8)) {
        request.handoff.rendezvous_key = reader.name;  // nobody brings it
      } else {
        // DRAM may be full; then there is nothing to start.
        const Manifest manifest = node.MakeManifest(g.prompt, whole, tokens);
        if (node.dram().HeadroomNow().firm_tokens.least() < whole) return;
        request.handoff.transfer_id =
            node.Push(g.prompt, whole, tokens, g.k, chance(8) ? bad_v : g.v);
        if (chance(10)) return;  // its Generate never comes: the lease ends it
      }
      reader.stream =
          std::make_shared<TokenStream>(reader.reads ? 256 : 8, [&node] { node.engine().Wake(); });
      request.sink = reader.stream;
      if (node.engine().Submit(std::move(request)).ok()) readers.push_back(std::move(reader));
    };
    for (int step = 0; step < 120; ++step) {
      if (chance(2)) start();
      if (chance(12) && !readers.empty()) {
        node.engine().CancelRequest(readers[random.Below(readers.size())].name,
                                    absl::CancelledError("test"), [](bool) {});
      }
      if (chance(40)) {
        node.engine().Drain(clock.Now() + absl::Milliseconds(random.Below(4000)),
                            absl::UnavailableError("drained"), nullptr);
      }
      if (chance(15)) node.engine().Resume();
      if (chance(4)) clock.Advance(absl::Milliseconds(random.Below(500)));
      turner.Turn(static_cast<int>(random.Below(12)));
      for (Reader& reader : readers) {
        if (reader.reads) reader.Read();
      }
      REQUIRE(node.hbm().UsageOf(0).used_bytes <= node.hbm().UsageOf(0).capacity_bytes);
    }
    // The rest ends by itself or is ended, in either case once.
    node.engine().Resume();
    if (chance(2)) node.engine().CancelAll(absl::CancelledError("test"));
    const auto over = [&] {
      return std::all_of(readers.begin(), readers.end(),
                         [](const Reader& reader) { return reader.stream->Finished(); });
    };
    // All of them take fewer turns; the leases end last. A sequence that has just ended holds its
    // slot until the step that has it is done.
    for (int i = 0; i < 3000 && !(over() && i > 30 && Empty(node)); ++i) {
      turner.Turn(50);
      clock.Advance(absl::Milliseconds(i < 30 ? 1000 : 20));
      for (Reader& reader : readers) {
        if (reader.reads) reader.Read();
      }
    }
    for (Reader& reader : readers) {
      INFO(reader.name << " of round " << round);
      reader.Read();
      CHECK(reader.finishes == 1);
    }
    CHECK(Empty(node));
    CHECK(node.transfers().open_transfers() == 0);
    preempted += node.metrics().preemptions.Value();
  }
  CHECK(preempted > 0);
}

TEST_CASE("a sequence's memory is back one step after it has ended") {
  NodeOptions options = Options();
  options.run_engine = false;
  Node node(options);
  Turner turner(&node);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 4; ++i) {
    Request request = GreedyRequest(Golden().prompt, 900);
    request.request_id = absl::StrCat("s", i);
    streams.push_back(node.Start(std::move(request)));
  }
  turner.Turn(60);
  const int64_t each = Reserved(node.hbm()) / 4;
  for (int i = 0; i < 4; ++i) {
    node.engine().CancelRequest(absl::StrCat("s", i), absl::CancelledError("test"), [](bool) {});
    const uint64_t steps = node.engine().times().steps;
    while (Reserved(node.hbm()) > (3 - i) * each) {
      turner.Turn(1);
      // At most the steps launched when it ended, and one that makes the release visible.
      REQUIRE(node.engine().times().steps <= steps + 3);
    }
  }
  CHECK(Empty(node));
}

TEST_CASE("on the real clock memory is back within a step and 100 ms") {
  Node node(Options());
  absl::Duration best = absl::InfiniteDuration();
  // A machine under load may hold this thread up: one good round in ten shows that the engine does
  // not wait.
  for (int round = 0; round < 10 && best > absl::Milliseconds(100); ++round) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 8; ++i) streams.push_back(node.Start(GreedyRequest(Golden().prompt, 900)));
    while (streams.back()->Read().tokens.empty()) absl::SleepFor(absl::Milliseconds(1));
    node.engine().CancelAll(absl::CancelledError("test"));
    for (const auto& stream : streams) Node::Collect(*stream);
    const absl::Time ended = absl::Now();
    while (!Empty(node)) absl::SleepFor(absl::Microseconds(200));
    best = std::min(best, absl::Now() - ended);
  }
  CHECK(best <= absl::Milliseconds(100));
}

TEST_CASE("a device that fails ends every sequence, and no other comes") {
  if (!kFailpointsCompiledIn) return SkipTest("this build has no failpoints");
  NodeOptions options = Options();
  options.max_sequences = 2;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(node.Start(GreedyRequest(Golden().prompt, 500)));
  const ScopedFailpoints armed("device.failure=error*1@40");
  for (const auto& stream : streams) {
    const Generated got = Node::Collect(*stream);
    CHECK(got.finish.reason == Reason::kError);
    CHECK(absl::IsInternal(got.finish.status));
    CHECK(ReasonOf(got.finish.status) == "GPU_FAILED");
  }
  Request late = GreedyRequest({1}, 1);
  late.request_id = "late";
  late.sink = std::make_shared<TokenStream>(2);
  CHECK(ReasonOf(node.engine().Submit(std::move(late)).status()) == "GPU_FAILED");
  CHECK(node.Quiescent());
}

}  // namespace
}  // namespace sluice
