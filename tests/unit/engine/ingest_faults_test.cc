// Transfers that go wrong under a running engine, with its real thread and the real clock.
#include <catch2/catch.hpp>
#include <memory>

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

constexpr char kModel[] = "tiny-llama";

NodeOptions Options() {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  return options;
}

const fixtures::GoldenCase& Golden() {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[1];
}

struct Chunk {
  ChunkHeader header;
  std::vector<uint8_t> payload;
};

// The golden caches of one layer.
Chunk LayerChunk(Node& node, const std::string& id, uint32_t layer) {
  const fixtures::GoldenCase& g = Golden();
  const auto context = static_cast<uint32_t>(g.prompt.size());
  Chunk chunk;
  chunk.payload = node.ChunkPayload(g.k[layer], g.v[layer], 0, context);
  chunk.header = {id, layer, "kv", 0, 2, 0, context, Crc32c(chunk.payload)};
  return chunk;
}

std::string Reserve(Node& node, absl::Duration lease = absl::ZeroDuration()) {
  const auto context = static_cast<uint32_t>(Golden().prompt.size());
  Manifest manifest = node.MakeManifest(Golden().prompt, context, 8);
  manifest.lease = lease;
  const auto reserved = node.transfers().Reserve(manifest);
  INFO(std::string(reserved.status().ToString()));
  REQUIRE(reserved.ok());
  return reserved->transfer_id;
}

void LandAll(Node& node, const std::string& id) {
  for (uint32_t layer = 0; layer < Golden().k.size(); ++layer) {
    const Chunk chunk = LayerChunk(node, id, layer);
    REQUIRE(node.Land(chunk.header, chunk.payload).ok());
  }
}

Request ById(const std::string& id) {
  Request request = GreedyRequest({}, 8);
  request.handoff.transfer_id = id;
  return request;
}

std::vector<int32_t> Expected(Node& node) {
  const std::string id = Reserve(node);
  LandAll(node, id);
  REQUIRE(node.transfers().Commit(id, {}, nullptr).ok());
  return node.Generate(ById(id)).ids;
}

TEST_CASE("an idle engine reclaims a transfer whose lease ends, and nothing else has to arrive") {
  Node node(Options());
  const std::string id = Reserve(node, absl::Milliseconds(50));
  CHECK(node.dram().UsageOf(0).reserved_bytes > 0);
  CHECK(node.Quiescent());
  CHECK(node.transfers().open_transfers() == 0);
}

TEST_CASE("a writer held up past its lease keeps its pages from everyone, and harms nobody") {
  NodeOptions options = Options();
  options.prefix_cache = false;  // every transfer takes pages for all of its prompt
  const auto context = static_cast<int64_t>(Golden().prompt.size());
  // DRAM for one transfer and a half; the rest of an arena is alignment.
  {
    Node probe(options);
    options.dram_bytes = 8192 + probe.model().cache_layout().BytesFor(context) * 3 / 2;
  }
  Node node(options);
  const std::vector<int32_t> want = Expected(node);
  REQUIRE(node.Quiescent());

  const std::string late = Reserve(node, absl::Milliseconds(50));
  Chunk chunk = LayerChunk(node, late, 0);
  std::fill(chunk.payload.begin(), chunk.payload.end(), uint8_t{0x7F});
  chunk.header.crc32c = Crc32c(chunk.payload);
  auto landing = node.transfers().BeginChunk(chunk.header, chunk.payload.size());
  REQUIRE(landing.ok());
  (*landing)->Append(absl::Span<const uint8_t>(chunk.payload).subspan(0, 100));
  REQUIRE(testing::Eventually(absl::Seconds(10),
                              [&] { return node.transfers().open_transfers() == 0; }));
  // The lease is long over, and its writer still there: there is no capacity for another.
  absl::SleepFor(absl::Milliseconds(200));
  const auto refused = node.transfers().Reserve(
      node.MakeManifest(Golden().prompt, static_cast<uint32_t>(context), 8));
  CHECK(ReasonOf(refused.status()) == "DRAM_FULL");
  (*landing)->Append(absl::Span<const uint8_t>(chunk.payload).subspan(100));
  CHECK(ReasonOf((*landing)->Finish().status()) == "TRANSFER_NOT_FOUND");
  landing->reset();
  CHECK(Expected(node) == want);
  CHECK(node.Quiescent());
}

TEST_CASE("no wake-up from the transfers: the Generate is late, and the lease still ends") {
  NodeOptions options = Options();
  Node node(options);
  const std::vector<int32_t> want = Expected(node);
  node.transfers().SetWake(nullptr);  // every notification is lost from here on
  const std::string id = Reserve(node);
  const auto stream = node.Start(ById(id));
  absl::SleepFor(absl::Milliseconds(20));  // the engine sleeps by now
  LandAll(node, id);
  const absl::Time committed = absl::Now();
  REQUIRE(node.transfers().Commit(id, {}, nullptr).ok());
  CHECK(Node::Collect(*stream).ids == want);
  // This is long before its lease and its transfer_wait of 60 s.
  CHECK(absl::Now() - committed < absl::Seconds(20));
  Reserve(node, absl::Milliseconds(50));
  CHECK(node.Quiescent());
}

TEST_CASE(
    "a chunk that failed its checksum is never decoded from: sent again, the tokens are right") {
  Node node(Options());
  const std::vector<int32_t> want = Expected(node);
  const std::string id = Reserve(node);
  const auto stream = node.Start(ById(id));
  Chunk damaged = LayerChunk(node, id, 0);
  damaged.payload[700] ^= 0x40;
  CHECK(absl::IsDataLoss(node.Land(damaged.header, damaged.payload).status()));
  for (uint32_t layer = 1; layer < Golden().k.size(); ++layer) {
    const Chunk chunk = LayerChunk(node, id, layer);
    REQUIRE(node.Land(chunk.header, chunk.payload).ok());
  }
  CHECK(ReasonOf(node.transfers().Commit(id, {}, nullptr).status()) == "MISSING_BLOCKS");
  absl::SleepFor(absl::Milliseconds(150));
  CHECK(stream->Read().tokens.empty());
  const Chunk good = LayerChunk(node, id, 0);
  REQUIRE(node.Land(good.header, good.payload).ok());
  REQUIRE(node.transfers().Commit(id, {}, nullptr).ok());
  CHECK(Node::Collect(*stream).ids == want);
  CHECK(node.Quiescent());
}

TEST_CASE("two Generates for one transfer: the first has it, whatever the order of the rest") {
  Node node(Options());
  const std::vector<int32_t> want = Expected(node);
  const auto refused = [&](const std::string& id) {
    Request request = ById(id);
    request.request_id = "second";
    request.sink = std::make_shared<TokenStream>(64);
    return ReasonOf(node.engine().Submit(std::move(request)).status()).value_or("accepted");
  };
  const std::string id = Reserve(node);
  const auto stream = node.Start(ById(id));
  CHECK(refused(id) == "GENERATE_EXISTS");  // before the transfer is complete
  LandAll(node, id);
  CHECK(refused(id) == "GENERATE_EXISTS");
  REQUIRE(node.transfers().Commit(id, {}, nullptr).ok());
  const Generated got = Node::Collect(*stream);
  CHECK(got.ids == want);
  CHECK(refused(id) == "TRANSFER_NOT_FOUND");  // decoded
  // The transfer is aborted under its Generate, and requested again.
  const std::string other = Reserve(node);
  const auto hears = node.Start(ById(other));
  REQUIRE(node.transfers().Abort(other, "by test").ok());
  CHECK(ReasonOf(Node::Collect(*hears).finish.status) == "TRANSFER_ABORTED");
  CHECK(refused(other) == "TRANSFER_NOT_FOUND");
  CHECK(node.Quiescent());
}

}  // namespace
}  // namespace sluice
