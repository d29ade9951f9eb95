// Tests pushes over links of the CPU device, between a LinkPush and a real ingest service.
#include "src/service/ingest/link_push.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/links/link_server.h"
#include "src/service/wire/status_mapping.h"
#include "tests/support/eventually.h"
#include "tests/support/or_fail.h"

namespace sluice {
namespace {

constexpr int kLayers = 11;  // more than are under way
constexpr absl::Duration kDeadline = absl::Seconds(1);
constexpr uint64_t kChunkBytes = 4096;  // of one layer: 2 heads x 32 tokens x 64 bytes

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 2;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 64);
  return {kLayers, {kind}};
}

Buffer Arena(size_t bytes) {
  return Buffer(std::calloc(1, bytes), bytes, [](void* data, size_t) { std::free(data); });
}

// Links of a device that there is not.
class OtherLinks : public PeerLinks {
 public:
  const char* transport() const override { return "pigeons"; }
  absl::StatusOr<std::string> NewId() override { return absl::InternalError("none"); }
  absl::Status CheckId(const std::string&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions&) override {
    return absl::InternalError("none");
  }
};

// Links of the CPU whose receiving ends are slow, and note how many messages are under way each
// time that they wait for one.
class SlowLinks : public PeerLinks {
 public:
  explicit SlowLinks(std::vector<int>* moving) : moving_(moving) {}
  const char* transport() const override { return links_->transport(); }
  absl::StatusOr<std::string> NewId() override { return links_->NewId(); }
  absl::Status CheckId(const std::string& id) const override { return links_->CheckId(id); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions& options) override {
    SLUICE_ASSIGN_OR_RETURN(auto link, links_->Join(options));
    return std::make_unique<Link>(options, std::move(link), moving_);
  }

 private:
  class Link : public PeerLink {
   public:
    Link(const PeerLinkOptions& options, std::unique_ptr<PeerLink> link, std::vector<int>* moving)
        : PeerLink(options.message_bytes, options.depth), link_(std::move(link)), moving_(moving) {}
    absl::StatusOr<uint32_t> Sent() override { return link_->Sent(); }
    absl::Status Flush() override { return link_->Flush(); }
    absl::StatusOr<uint32_t> Await() override {
      moving_->push_back(asked_--);
      absl::SleepFor(absl::Milliseconds(10));
      return link_->Await();
    }
    void Abort(const std::string& why) override { link_->Abort(why); }

   protected:
    absl::Status SendMessage(absl::Span<const Piece> pieces, size_t, bool checksum) override {
      return link_->Send(pieces, checksum);
    }
    absl::Status ReceiveMessage(absl::Span<const Piece> pieces, size_t) override {
      ++asked_;
      return link_->Receive(pieces);
    }

   private:
    const std::unique_ptr<PeerLink> link_;
    std::vector<int>* const moving_;
    int asked_ = 0;
  };

  const std::shared_ptr<PeerLinks> links_ = NewCpuPeerLinks();
  std::vector<int>* const moving_;
};

struct Town {
  explicit Town(bool linked = true, std::shared_ptr<PeerLinks> senders = NewCpuPeerLinks(),
                size_t message = kChunkBytes,
                std::shared_ptr<PeerLinks> receivers = NewCpuPeerLinks())
      : message_bytes(message) {
    hbm = OrFail(PagePool::Create("hbm", Layout(), Arena(1 << 20)));
    dram = OrFail(PagePool::Create("dram", Layout(), Arena(1 << 20)));
    TransferTable::Options options;
    options.model_fingerprint = "f00d";
    options.vocab_size = 100;
    options.max_context = 256;
    options.max_chunk_bytes = kChunkBytes;
    options.prefix_cache = false;
    options.footprint = [](int64_t context, int64_t total) { return Footprint{context, total}; };
    table = std::make_unique<TransferTable>(options, dram.get(), hbm.get(), RealClock());
    if (linked) {
      LinkServer::Options ends;
      ends.links = std::move(receivers);
      ends.deadline = kDeadline;
      link_server.emplace(std::move(ends));
    }
    Serve("127.0.0.1:0");
    LinkPeers::Options callers;
    callers.links = std::move(senders);
    callers.sends = true;
    callers.deadline = kDeadline;
    peers.emplace(std::move(callers));
    stub = v1::KvIngest::NewStub(
        grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / 251);
  }
  void Serve(const std::string& listen) {
    IngestServiceOptions service;
    service.vocab_size = 100;
    service.transfers = table.get();
    service.readiness = &readiness;
    service.metrics = &metrics;
    service.links = link_server.has_value() ? &*link_server : nullptr;
    service.link_message_bytes = message_bytes;
    GrpcServer::Options options;
    options.listen = listen;
    server = OrFail(GrpcServer::Start(options, {NewIngestService(service)}));
  }

  std::string Reserve() {
    Manifest manifest;
    manifest.model_fingerprint = "f00d";
    manifest.context_length = 32;
    manifest.prompt_token_ids.assign(32, 1);
    manifest.max_new_tokens = 4;
    return OrFail(table->Reserve(manifest)).transfer_id;
  }
  LinkPush::Options For(const std::string& transfer_id) {
    LinkPush::Options options;
    options.address = server->address();
    options.transfer_id = transfer_id;
    options.links = &*peers;
    options.stub = stub.get();
    options.new_context = [] { return std::make_unique<grpc::ClientContext>(); };
    return options;
  }
  absl::StatusOr<std::unique_ptr<LinkPush>> Open(const std::string& transfer_id) {
    return LinkPush::Open(For(transfer_id));
  }
  static LinkPush::Chunk Chunk(int layer) {
    LinkPush::Chunk chunk;
    chunk.header.set_layer(static_cast<uint64_t>(layer));
    chunk.header.set_kind("kv");
    chunk.header.set_head_end(2);
    chunk.header.set_token_end(32);
    chunk.bytes = kChunkBytes;
    return chunk;
  }
  // Sends a layer, and hears nothing of it yet.
  absl::Status Send(LinkPush& push, int layer) {
    // Pieces of any size, from the middle of others.
    const auto all = absl::MakeConstSpan(bytes);
    const std::vector<absl::Span<const uint8_t>> pieces = {all.subspan(0, 100), all.subspan(100, 1),
                                                           all.subspan(101)};
    LinkPush::Chunk chunk = Chunk(layer);
    chunk.offset = static_cast<uint64_t>(layer);
    return push.Send({chunk}, pieces);
  }
  // Sends a layer, and waits for what the node says.
  absl::Status Land(LinkPush& push, int layer) {
    const absl::Status sent = Send(push, layer);
    return sent.ok() ? push.Finish() : sent;
  }
  // Pushes a whole transfer, and compares every byte of it.
  void PushWell() {
    const std::string id = Reserve();
    const auto push = OrFail(Open(id));
    for (int layer = 0; layer < kLayers; ++layer) REQUIRE(Send(*push, layer).ok());
    REQUIRE(push->Finish().ok());
    CHECK(push->bytes_landed() == kLayers * kChunkBytes);
    TransferInfo missing;
    REQUIRE(table->Commit(id, {}, &missing, {}).ok());
    HandoffRef ref;
    ref.transfer_id = id;
    const auto ready = OrFail(table->TakeReady(OrFail(table->Attach(ref))));
    REQUIRE(ready.has_value());
    for (int layer = 0; layer < kLayers; ++layer) {
      size_t at = static_cast<size_t>(layer), wrong = 0;
      ready->home->ForEachPiece({layer, 0, 0, 2, 0, 32}, [&](const HomePiece& piece) {
        wrong += std::memcmp(piece.data, bytes.data() + at, piece.bytes) == 0 ? 0 : 1;
        at += piece.bytes;
      });
      CHECK(wrong == 0);
      CHECK(at == static_cast<size_t>(layer) + kChunkBytes);
    }
  }

  const size_t message_bytes;
  Metrics metrics;
  Readiness readiness;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<TransferTable> table;
  std::optional<LinkServer> link_server;
  std::unique_ptr<GrpcServer> server;
  std::optional<LinkPeers> peers;
  std::unique_ptr<v1::KvIngest::Stub> stub;
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kChunkBytes + kLayers);
};

// Returns the id of the link that the next push would use.
std::string LinkOf(Town& town) {
  const auto peer = OrFail(town.peers->Enter(town.server->address()));
  return peer->link == nullptr ? "" : peer->id;
}

TEST_CASE("chunks land over a link byte for byte, and count as those of a stream", "[links]") {
  Town town;
  town.PushWell();
  const std::string link = LinkOf(town);
  CHECK_FALSE(link.empty());
  town.PushWell();
  CHECK(LinkOf(town) == link);
  const std::string metrics = town.metrics.Render();
  CHECK(metrics.find("sluice_ingest_bytes_total " + std::to_string(2 * kLayers * kChunkBytes)) !=
        std::string::npos);
  CHECK(metrics.find("sluice_ingest_blocks_total " + std::to_string(4 * kLayers) + "\n") !=
        std::string::npos);
}

TEST_CASE("an error about a chunk is that of Write, and leaves the link to the next push",
          "[links]") {
  Town town;
  town.PushWell();
  const std::string link = LinkOf(town);
  const std::string id = town.Reserve();
  auto push = OrFail(town.Open(id));
  REQUIRE(town.Send(*push, 0).ok());
  absl::Status status;
  SECTION("the transfer has ended") {
    REQUIRE(town.table->Abort(id, "test").ok());
    status = town.Land(*push, 1);
    CHECK(absl::IsNotFound(status));
    CHECK(ReasonOf(status) == "TRANSFER_NOT_FOUND");
  }
  SECTION("it is another stream's") {
    ChunkHeader header;
    header.transfer_id = id;
    header.layer = 1;
    header.kind = "kv";
    header.head_end = 1;
    header.token_end = 32;
    const auto claimed = OrFail(town.table->BeginChunk(header, kChunkBytes / 2));
    status = town.Land(*push, 1);
    CHECK(absl::IsAborted(status));
    CHECK(ReasonOf(status) == "BLOCK_BUSY");
  }
  SECTION("it does not fit the transfer") {
    LinkPush::Chunk chunk = Town::Chunk(kLayers);
    // It is heard of while others are sent, or at the end.
    std::vector<LinkPush::Chunk> chunks(12, Town::Chunk(1));
    chunks[0] = chunk;
    status = push->Send(chunks, {absl::MakeConstSpan(town.bytes)});
    if (status.ok()) status = push->Finish();
    CHECK(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == "header.layer");
  }
#ifndef SLUICE_NO_FAILPOINTS
  SECTION("its checksum is wrong") {
    REQUIRE(push->Finish().ok());
    CHECK(push->bytes_landed() == kChunkBytes);
    push = OrFail(town.Open(id));
    ScopedFailpoints armed("ingest.checksum=error*1");
    status = town.Land(*push, 1);
    CHECK(absl::IsDataLoss(status));
    CHECK(ReasonOf(status) == "CHECKSUM_MISMATCH");
    CHECK(OrFail(town.table->Get(id, 8)).blocks_landed == 2);
    CHECK(push->bytes_landed() == 0);
  }
#endif
  CHECK_FALSE(status.ok());
  push.reset();
  CHECK(LinkOf(town) == link);
  town.table->Abort(id, "test").IgnoreError();
  town.PushWell();
  CHECK(LinkOf(town) == link);
}

TEST_CASE("chunks share a message as far as they fit, and land each by itself", "[links]") {
  Town town(/*linked=*/true, NewCpuPeerLinks(), 4 * kChunkBytes);
#ifndef SLUICE_NO_FAILPOINTS
  {
    // Eleven chunks are three messages.
    ScopedFailpoints armed("link.send=error*1@4");
    town.PushWell();
  }
#endif
  const std::string id = town.Reserve();
  const auto push = OrFail(town.Open(id));
  absl::Status status = push->Send({Town::Chunk(0), Town::Chunk(kLayers), Town::Chunk(1)},
                                   {absl::MakeConstSpan(town.bytes)});
  if (status.ok()) status = push->Finish();
  CHECK(absl::IsInvalidArgument(status));
  CHECK(FieldOf(status) == "header.layer");
  CHECK(push->bytes_landed() == 0);
  CHECK(OrFail(town.table->Get(id, 8)).blocks_landed == 4);
  town.PushWell();
}

TEST_CASE("the next messages move while one lands", "[links]") {
  std::vector<int> moving;
  {
    Town town(/*linked=*/true, NewCpuPeerLinks(), kChunkBytes,
              std::make_shared<SlowLinks>(&moving));
    town.PushWell();
  }
  REQUIRE(moving.size() == kLayers);
  // The first four are there before anything has to land for another one.
  CHECK(*std::max_element(moving.begin() + 4, moving.end()) > 1);
}

TEST_CASE("blocks that have landed are counted once", "[links]") {
  Town town;
  const std::string id = town.Reserve();
  for (int i = 0; i < 2; ++i) REQUIRE(town.Land(*OrFail(town.Open(id)), 1).ok());
  CHECK(OrFail(town.table->Get(id, 8)).blocks_landed == 2);
}

TEST_CASE("a push that is given up ends its link, and the next one makes another", "[links]") {
  Town town;
  const std::string id = town.Reserve();
  {
    const auto push = OrFail(town.Open(id));
    REQUIRE(town.Send(*push, 0).ok());
  }
  CHECK(LinkOf(town).empty());
  // Its checksum had not been sent.
  CHECK(OrFail(town.table->Get(id, 8)).blocks_landed == 0);
  town.PushWell();
}

#ifndef SLUICE_NO_FAILPOINTS
TEST_CASE("a link that fails in the middle of a push fails it in time", "[links]") {
  Town town;
  const std::string id = town.Reserve();
  auto push = OrFail(town.Open(id));
  REQUIRE(town.Send(*push, 0).ok());
  {
    // The link breaks, or its sender stands still for longer than the deadline.
    ScopedFailpoints armed(
        GENERATE(as<std::string>{}, "link.send=error*1", "link.send=delay(2500ms)*1"));
    const absl::Time begin = absl::Now();
    CHECK(absl::IsUnavailable(town.Land(*push, 1)));
    CHECK(absl::Now() - begin < absl::Seconds(8));
  }
  push.reset();
  town.table->Abort(id, "test").IgnoreError();
  // Nothing of the failed push holds the transfer's memory.
  CHECK(testing::Eventually(absl::Seconds(5),
                            [&] { return town.dram->UsageOf(0).reserved_bytes == 0; }));
  town.PushWell();
}
#endif

TEST_CASE("a node without links, or with links of another kind, says so once", "[links]") {
  SECTION("none") {
    Town town(/*linked=*/false);
    for (int i = 0; i < 2; ++i) {
      const absl::Status refused = town.Open(town.Reserve()).status();
      CHECK(absl::IsFailedPrecondition(refused));
      CHECK(refused.message().find("kv_transport is grpc") != std::string::npos);
    }
  }
  SECTION("another kind") {
    Town town(/*linked=*/true, std::make_shared<OtherLinks>());
    const absl::Status refused = town.Open(town.Reserve()).status();
    CHECK(absl::IsFailedPrecondition(refused));
    CHECK(refused.message().find("pigeons") != std::string::npos);
  }
}

TEST_CASE("a transfer that is not there is refused before a link is made", "[links]") {
  Town town;
  CHECK(absl::IsNotFound(town.Open(std::string(32, '0')).status()));
  CHECK(LinkOf(town).empty());
  town.PushWell();
}

TEST_CASE("a push waits for its turn on the link, but not longer than the deadline", "[links]") {
  Town town;
  auto first = OrFail(town.Open(town.Reserve()));
  const absl::Status late = town.Open(town.Reserve()).status();
  CHECK(absl::IsUnavailable(late));
  std::thread ends([&] {
    absl::SleepFor(kDeadline / 4);
    first->Finish().IgnoreError();
  });
  const auto second = town.Open(town.Reserve());
  ends.join();
  CHECK(second.ok());
}

TEST_CASE("a decode node that forgets a link is given another", "[links]") {
  Town town;
  town.PushWell();
  const std::string link = LinkOf(town);
  // Eight links of other nodes push the first one out. Nobody joins them.
  for (int i = 0; i < 8; ++i) {
    PeerLinkOptions options;
    options.id = OrFail(NewCpuPeerLinks()->NewId());
    // The thread of the first one may still be about to end its last use.
    REQUIRE(testing::Eventually(absl::Seconds(5),
                                [&] { return town.link_server->Make(options).ok(); }));
  }
  absl::SleepFor(2 * kDeadline + absl::Milliseconds(500));
  town.PushWell();
  CHECK(LinkOf(town) != link);
}

TEST_CASE("a stream that does not keep to the order is told so, and harms nobody", "[links]") {
  Town town;
  const auto answer_to = [&](const std::vector<v1::WriteByLinkRequest>& messages) {
    grpc::ClientContext context;
    const auto stream = town.stub->WriteByLink(&context);
    for (const auto& message : messages) stream->Write(message);
    stream->WritesDone();
    v1::WriteByLinkResponse answer;
    while (stream->Read(&answer)) continue;
    return FromGrpcStatus(stream->Finish());
  };
  v1::WriteByLinkRequest chunk;
  chunk.mutable_message()->add_chunks()->set_bytes(5);
  CHECK(FieldOf(answer_to({})) == "open");
  CHECK(FieldOf(answer_to({chunk})) == "open");
  v1::WriteByLinkRequest open;
  open.mutable_open()->set_transfer_id(std::string(200, 'x'));
  CHECK(FieldOf(answer_to({open})) == "open.transfer_id");
  open.mutable_open()->set_transfer_id(town.Reserve());
  open.mutable_open()->set_transport("shared_memory");
  // It breaks off while the node waits for the other end of the link.
  const absl::Status broken = answer_to({open, chunk});
  CHECK_FALSE(broken.ok());
  town.PushWell();
}

TEST_CASE("a sender that keeps checksums back, or sends too many, loses its link", "[links]") {
  Town town;
  grpc::ClientContext context;
  const auto stream = town.stub->WriteByLink(&context);
  v1::WriteByLinkRequest open;
  open.mutable_open()->set_transfer_id(town.Reserve());
  open.mutable_open()->set_transport("shared_memory");
  REQUIRE(stream->Write(open));
  v1::WriteByLinkResponse answer;
  REQUIRE(stream->Read(&answer));
  PeerLinkOptions options;
  options.id = answer.link_id();
  options.sends = true;
  options.message_bytes = answer.message_bytes();
  options.depth = static_cast<int>(answer.depth());
  const auto link = OrFail(NewCpuPeerLinks()->Join(options));
  while (!answer.ready()) REQUIRE(stream->Read(&answer));
  v1::WriteByLinkRequest crc;
  crc.set_crc32c(7);
  std::string words, field = "crc32c";
  SECTION("one is missing at the end") {
    const LinkPush::Chunk chunk = Town::Chunk(0);
    v1::WriteByLinkRequest header;
    v1::LinkChunk& added = *header.mutable_message()->add_chunks();
    *added.mutable_header() = chunk.header;
    added.set_bytes(chunk.bytes);
    stream->Write(header);
    const PeerLink::Piece piece = {town.bytes.data(), chunk.bytes};
    REQUIRE(link->Send({&piece, 1}).ok());
    v1::WriteByLinkRequest end;
    end.set_end(true);
    stream->Write(end);
    words = "is missing for a message";
  }
  SECTION("a message has too many chunks") {
    v1::WriteByLinkRequest many;
    for (int i = 0; i < 1025; ++i) many.mutable_message()->add_chunks();
    stream->Write(many);
    field = "message.chunks";
    words = "has 1025 entries";
  }
  SECTION("a message has none") {
    v1::WriteByLinkRequest none;
    none.mutable_message();
    stream->Write(none);
    field = "";
    words = "at least one byte";
  }
  SECTION("they come for no messages") {
    for (int i = 0; i < 256; ++i) stream->Write(crc);
    words = "for more messages than were sent";
  }
  while (stream->Read(&answer)) continue;
  const absl::Status status = FromGrpcStatus(stream->Finish());
  CHECK(absl::IsInvalidArgument(status));
  CHECK(FieldOf(status).value_or("") == field);
  CHECK(status.message().find(words) != std::string::npos);
  town.PushWell();
}

}  // namespace
}  // namespace sluice
