#include "src/service/pull/puller.h"

#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/kv/page_pool.h"
#include "src/metrics/metrics.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/rooms.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/links/link_server.h"
#include "src/service/pull/link_reader.h"
#include "src/service/pull/source_service.h"
#include "tests/support/eventually.h"
#include "tests/support/or_fail.h"

namespace sluice {
namespace {

constexpr int kTokens = 256;
const std::string kFingerprint(64, 'a');

// A layer has 8 MiB: two chunks of 4 MiB, or one.
CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 4;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 8192);
  return {2, {kind}};
}

class FakePrefiller : public Prefiller {
 public:
  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&, bool,
                                    LayerSink& sink, const std::function<bool()>&) override {
    const CacheLayout layout = Layout();
    for (int layer = 0; layer < layout.layers; ++layer) {
      std::vector<uint8_t> bytes(static_cast<size_t>(layout.BytesFor(kTokens) / layout.layers));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / 997);
      const absl::Span<const uint8_t> pieces[] = {bytes};
      const absl::Status taken =
          sink.Layer(layer, layout.kinds[0], 0, static_cast<int>(prompt.size()), pieces);
      if (!taken.ok()) return taken;
    }
    return PrefillResult();
  }
};

// Which nodes have kv_transport nccl, on the CPU device.
enum class Links { kNone, kReader, kBoth };
constexpr absl::Duration kLinkDeadline = absl::Seconds(1);

// A source, and the reading side of a decode node.
struct Pair {
  explicit Pair(const std::string& sources = "127.0.0.1", Links links = Links::kNone) {
    HeldPrompts::Options hold;
    hold.layout = Layout();
    device = OrFail(NewCpuDevice({"auto", 1}));
    Buffer arena;
    if (links == Links::kBoth) {
      hold.max_bytes = uint64_t{256} << 20;
      arena = OrFail(device->Allocate(MemoryKind::kPinned, hold.max_bytes, "held prompts"));
    }
    held.emplace(hold, &prefiller, std::move(arena));
    SourceServiceOptions service;
    service.model_fingerprint = kFingerprint;
    service.layout = Layout();
    service.max_chunk_bytes = uint64_t{64} << 20;
    service.held = &*held;
    service.rooms = rooms;
    if (links == Links::kBoth) {
      LinkServer::Options options;
      options.sends = true;
      options.links = NewCpuPeerLinks();
      options.deadline = kLinkDeadline;
      source_links.emplace(std::move(options));
      service.links = &*source_links;
    }
    service.longest_wait = absl::Milliseconds(100);
    GrpcServer::Options listen;
    listen.listen = "127.0.0.1:0";
    server = OrFail(GrpcServer::Start(listen, {NewSourceService(service)}));
    for (auto* pool : {&dram, &hbm}) {
      *pool = OrFail(PagePool::Create(
          "pool", Layout(), OrFail(device->Allocate(MemoryKind::kPinned, 80 << 20, "pool"))));
    }
    TransferTable::Options options;
    options.model_fingerprint = kFingerprint;
    options.vocab_size = 1000;
    options.max_context = 4096;
    options.max_chunk_bytes = uint64_t{1} << 20;  // messages of links may be larger
    options.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
    table.emplace(options, dram.get(), hbm.get(), RealClock());
    table->SetWake([this] {
      absl::MutexLock lock(&mutex);
      changed = true;
    });
    Puller::Options pull;
    pull.metrics = &metrics;
    pull.model_fingerprint = kFingerprint;
    pull.layout = Layout();
    pull.max_context = pull.max_tokens = 4096;
    pull.max_chunk_bytes = options.max_chunk_bytes;
    pull.threads = 2;
    pull.room_timeout = absl::Milliseconds(500);
    pull.sources = OrFail(AddressList::Parse(sources));
    pull.transfers = &*table;
    pull.channels = &channels;
    if (links != Links::kNone) {
      LinkReader::Options read;
      read.peers.links = NewCpuPeerLinks();
      read.peers.deadline = kLinkDeadline;
      read.message_bytes = size_t{2} << 20;
      reader.emplace(std::move(read));
      pull.links = &*reader;
    }
    puller.emplace(std::move(pull));
  }

  Request Wanted() {
    HeldPrompts::Wanted wanted;
    wanted.prompt.assign(kTokens, 7);
    const HeldPrompts::Held made = OrFail(held->Hold(wanted, [] { return false; }));
    Request request;
    request.prompt = wanted.prompt;
    request.sampling.max_tokens = 4;
    request.handoff.source = {server->address(), made.prompt->source_id, made.prompt->prompt_digest,
                              kFingerprint};
    return request;
  }
  // Returns a request for a prompt that nobody has promised yet.
  Request InRoom(uint64_t room) {
    Request request;
    request.prompt.assign(kTokens, 7);
    request.sampling.max_tokens = 4;
    request.handoff.source.address = server->address();
    request.handoff.source.room = room;
    return request;
  }
  std::shared_ptr<Rooms::Promise> Promise(uint64_t room) {
    return OrFail(rooms->Open({"", room}, PromptDigest(std::vector<int32_t>(kTokens, 7))));
  }
  // Fills the room as a prefill node does once the prompt is computed.
  void Fill(std::shared_ptr<Rooms::Promise> promise) {
    HeldPrompts::Wanted wanted;
    wanted.prompt.assign(kTokens, 7);
    wanted.keep = promise;
    promise->Fill(OrFail(held->Hold(wanted, [] { return false; })).prompt->source_id);
  }

  // Waits as the engine does for the transfer that Begin named.
  absl::StatusOr<ReadySequence> Read(Request* request) {
    const auto begin = OrFail(puller->Begin(request));
    const auto id = OrFail(table->Attach(request->handoff));
    begin();
    return Wait(id);
  }
  absl::StatusOr<ReadySequence> Wait(TransferTable::AttachId id) {
    while (true) {
      absl::StatusOr<std::optional<ReadySequence>> ready = table->TakeReady(id);
      if (!ready.ok()) return ready.status();
      if (ready->has_value()) return **std::move(ready);
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&changed));
      changed = false;
    }
  }

  Metrics metrics;
  FakePrefiller prefiller;
  const std::shared_ptr<Rooms> rooms = std::make_shared<Rooms>();
  std::unique_ptr<Device> device;
  std::optional<HeldPrompts> held;
  std::optional<LinkServer> source_links;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<PagePool> dram, hbm;
  absl::Mutex mutex;
  bool changed = false;
  std::optional<TransferTable> table;
  Channels channels{nullptr, MaxChunkMessageBytes(uint64_t{8} << 20)};
  std::optional<LinkReader> reader;
  std::optional<Puller> puller;  // last: its threads use the rest
};

TEST_CASE("chunks as large as gRPC's own limit of a message arrive whole") {
  Pair pair;
  Request request = pair.Wanted();
  const auto read = pair.Read(&request);
  CHECK(request.handoff.source.empty());
  INFO(read.status().ToString());
  REQUIRE(read.ok());
  CHECK(read->context_length == kTokens);
  CHECK(read->prompt == request.prompt);
  pair.puller.reset();  // ends when the source has heard of it
  CHECK(pair.held->usage().prompts == 0);
  CHECK(pair.metrics.Render().find("sluice_pulls_total{outcome=\"done\",reason=\"NONE\"} 1") !=
        std::string::npos);
}

// Returns the caches of a layer, block by block, as FakePrefiller made them.
std::vector<uint8_t> LayerOf(const ReadySequence& ready, int layer) {
  std::vector<uint8_t> bytes;
  HomeRange range;
  range.layer = layer;
  range.head_end = 4;
  range.token_end = kTokens;
  ready.home->ForEachPiece(
      range, [&](const HomePiece& at) { bytes.insert(bytes.end(), at.data, at.data + at.bytes); });
  return bytes;
}

// Reads a prompt and checks every byte of it. Returns the metrics.
std::string ReadWell(Pair& pair) {
  Request request = pair.Wanted();
  const auto read = pair.Read(&request);
  INFO(read.status().ToString());
  REQUIRE(read.ok());
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<uint8_t> found = LayerOf(*read, layer);
    REQUIRE(found.size() == size_t{8} << 20);
    size_t wrong = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      wrong += found[i] == static_cast<uint8_t>(i * 31 + i / 997) ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
  return pair.metrics.Render();
}

bool Has(const std::string& metrics, const std::string& line) {
  return metrics.find(line + "\n") != std::string::npos;
}
const std::string kAllBytes = std::to_string(size_t{16} << 20);

TEST_CASE("caches come over a link where both nodes have one", "[links]") {
  Pair pair("127.0.0.1", Links::kBoth);
  ReadWell(pair);
  const std::string metrics = ReadWell(pair);
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"done\"} 2"));
  CHECK(Has(metrics, "sluice_pull_bytes_total{transport=\"shared_memory\"} " +
                         std::to_string(size_t{32} << 20)));
  CHECK(Has(metrics, "sluice_pull_bytes_total{transport=\"grpc\"} 0"));
  pair.puller.reset();
  CHECK(pair.held->usage().prompts == 0);
}

TEST_CASE("caches come over gRPC where one node alone has links", "[links]") {
  Pair pair("127.0.0.1", Links::kReader);
  const std::string metrics = ReadWell(pair);
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"refused\"} 1"));
  CHECK(Has(metrics, "sluice_pull_bytes_total{transport=\"grpc\"} " + kAllBytes));
}

TEST_CASE("several reads from one source take turns on its link", "[links]") {
  Pair pair("127.0.0.1", Links::kBoth);
  std::vector<TransferTable::AttachId> ids;
  for (int i = 0; i < 4; ++i) {  // with 2 threads, and room for 5
    Request request = pair.Wanted();
    const auto begin = OrFail(pair.puller->Begin(&request));
    ids.push_back(OrFail(pair.table->Attach(request.handoff)));
    begin();
  }
  for (const auto id : ids) CHECK(pair.Wait(id).ok());
  const std::string metrics = pair.metrics.Render();
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"done\"} 4"));
  CHECK(Has(metrics, "sluice_pull_bytes_total{transport=\"grpc\"} 0"));
}

#ifndef SLUICE_NO_FAILPOINTS
TEST_CASE("a link that breaks is replaced, and gRPC brings the rest", "[links]") {
  // The first: it breaks. The second: its sender stands still beyond the deadline.
  const std::string terms = GENERATE(as<std::string>{}, "link.send=error*1@3",
                                     "link.send=delay(2500ms)*1@3", "link.send=error*1");
  INFO(terms);
  Pair pair("127.0.0.1", Links::kBoth);
  {
    ScopedFailpoints armed(terms);
    const std::string metrics = ReadWell(pair);
    CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"broken\"} 1"));
    CHECK_FALSE(Has(metrics, "sluice_pull_bytes_total{transport=\"grpc\"} 0"));
  }
  const std::string metrics = ReadWell(pair);
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"done\"} 1"));
  CHECK(Has(metrics, "sluice_pulls_total{outcome=\"done\",reason=\"NONE\"} 2"));
}

TEST_CASE("a chunk of a link that lacks its checksum is read again over gRPC", "[links]") {
  Pair pair("127.0.0.1", Links::kBoth);
  ScopedFailpoints armed("source.checksum=error*1@1");
  const std::string metrics = ReadWell(pair);
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"broken\"} 1"));
  CHECK(Has(metrics,
            "sluice_pull_bytes_total{transport=\"grpc\"} " + std::to_string(size_t{2} << 20)));
}
#endif

TEST_CASE("a source that has begun anew gets a new link", "[links]") {
  Pair pair("127.0.0.1", Links::kBoth);
  ReadWell(pair);
  // Eight links of other readers push the first one out.
  for (int i = 0; i < 8; ++i) {
    PeerLinkOptions options;
    const auto links = NewCpuPeerLinks();
    options.id = OrFail(links->NewId());
    // The thread of the first one may still be about to end its last use.
    REQUIRE(testing::Eventually(absl::Seconds(5),
                                [&] { return pair.source_links->Make(options).ok(); }));
  }
  absl::SleepFor(2 * kLinkDeadline + absl::Milliseconds(500));  // nobody joins them
  const std::string metrics = ReadWell(pair);
  CHECK(Has(metrics, "sluice_pull_link_reads_total{outcome=\"done\"} 2"));
}

TEST_CASE("links that take too much memory, or fit no device, are refused", "[links]") {
  LinkServer::Options options;
  options.links = NewCpuPeerLinks();
  LinkServer links(std::move(options));
  PeerLinkOptions link;
  link.id = "nccl:1";
  CHECK(absl::IsFailedPrecondition(links.CheckNew(link)));
  link.depth = 64;
  CHECK(FieldOf(links.CheckNew(link)) == "message_bytes");
  link.depth = 1000;
  CHECK(absl::IsInvalidArgument(links.CheckNew(link)));
  CHECK(absl::IsNotFound(links.Post("another", [](PeerLink&) { return absl::OkStatus(); })));
}

TEST_CASE("a source that is not named is not called") {
  Pair pair("prefill-0, 10.0.0.0/8");
  Request request = pair.Wanted();
  const absl::Status status = pair.puller->Begin(&request).status();
  CHECK(absl::IsPermissionDenied(status));
  CHECK(ReasonOf(status) == "SOURCE_NOT_ALLOWED");
  CHECK_FALSE(request.handoff.source.empty());
  CHECK(pair.table->open_transfers() == 0);
  CHECK(pair.held->usage().prompts == 1);
}

TEST_CASE("a prompt that is not there any more ends its transfer, and takes nothing") {
  Pair pair;
  Request request = pair.Wanted();
  CHECK(pair.held->Release(request.handoff.source.source_id, ""));
  const auto read = pair.Read(&request);
  CHECK(ReasonOf(read.status()) == "SOURCE_NOT_FOUND");
  CHECK(pair.table->open_transfers() == 0);
}

TEST_CASE("more prompts may be waited for than there are threads") {
  constexpr int kWaiting = 4;  // with 2 threads
  Pair pair;
  std::vector<std::shared_ptr<Rooms::Promise>> promises;
  std::vector<TransferTable::AttachId> ids;
  for (uint64_t room = 0; room < kWaiting; ++room) {
    Request request = pair.InRoom(room);
    const auto begin = OrFail(pair.puller->Begin(&request));
    ids.push_back(OrFail(pair.table->Attach(request.handoff)));
    begin();
    if (room % 2 == 0) promises.push_back(pair.Promise(room));
  }
  // The last prompt that came is the first to be read. Nobody's wait is over, though each took
  // several calls.
  absl::SleepFor(absl::Milliseconds(300));
  for (uint64_t room = 1; room < kWaiting; room += 2) promises.push_back(pair.Promise(room));
  absl::SleepFor(absl::Milliseconds(300));
  while (!promises.empty()) {
    pair.Fill(std::move(promises.back()));
    promises.pop_back();
  }
  for (const auto id : ids) {
    const auto read = pair.Wait(id);
    INFO(read.status().ToString());
    REQUIRE(read.ok());
    CHECK(read->context_length == kTokens);
  }
  pair.puller.reset();
  CHECK(pair.held->usage().prompts == 0);
}

TEST_CASE("a room that nobody comes to ends the transfer in time") {
  Pair pair;
  Request request = pair.InRoom(5);
  const auto read = pair.Read(&request);
  CHECK(absl::IsDeadlineExceeded(read.status()));
  CHECK(ReasonOf(read.status()) == "ROOM_EMPTY");
  CHECK(pair.table->open_transfers() == 0);
}

TEST_CASE("a node that ends leaves the rooms it waits in") {
  Pair pair;
  Request request = pair.InRoom(5);
  const auto begin = OrFail(pair.puller->Begin(&request));
  const auto id = OrFail(pair.table->Attach(request.handoff));
  begin();
  const auto promise = pair.Promise(5);
  pair.puller.reset();
  CHECK_FALSE(pair.Wait(id).ok());
}

}  // namespace
}  // namespace sluice
