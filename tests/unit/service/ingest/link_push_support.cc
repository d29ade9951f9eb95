#include "tests/unit/service/ingest/link_push_support.h"

#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "src/base/clock.h"
#include "src/service/ingest/ingest_service.h"
#include "tests/support/or_fail.h"

namespace sluice::testing {
namespace {

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 2;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 64);
  return {PushPair::kLayers, {kind}};
}

Buffer Arena(size_t bytes) {
  return Buffer(std::calloc(1, bytes), bytes, [](void* data, size_t) { std::free(data); });
}

}  // namespace

PushPair::PushPair(bool linked, std::shared_ptr<PeerLinks> senders, size_t message,
                   std::shared_ptr<PeerLinks> receivers) {
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
  IngestServiceOptions service;
  service.vocab_size = 100;
  service.transfers = table.get();
  service.readiness = &readiness;
  service.metrics = &metrics;
  service.links = link_server.has_value() ? &*link_server : nullptr;
  service.link_message_bytes = message;
  GrpcServer::Options listen;
  listen.listen = "127.0.0.1:0";
  server = OrFail(GrpcServer::Start(listen, {NewIngestService(service)}));
  LinkPeers::Options callers;
  callers.links = std::move(senders);
  callers.sends = true;
  callers.deadline = kDeadline;
  peers.emplace(std::move(callers));
  stub = v1::KvIngest::NewStub(
      grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / 251);
}

std::string PushPair::Reserve() {
  Manifest manifest;
  manifest.model_fingerprint = "f00d";
  manifest.context_length = 32;
  manifest.prompt_token_ids.assign(32, 1);
  manifest.max_new_tokens = 4;
  return OrFail(table->Reserve(manifest)).transfer_id;
}

absl::StatusOr<std::unique_ptr<LinkPush>> PushPair::Open(const std::string& transfer_id) {
  LinkPush::Options options;
  options.address = server->address();
  options.transfer_id = transfer_id;
  options.links = &*peers;
  options.stub = stub.get();
  options.new_context = [] { return std::make_unique<grpc::ClientContext>(); };
  return LinkPush::Open(options);
}

LinkPush::Chunk PushPair::Chunk(int layer) {
  LinkPush::Chunk chunk;
  chunk.header.set_layer(static_cast<uint64_t>(layer));
  chunk.header.set_kind("kv");
  chunk.header.set_head_end(2);
  chunk.header.set_token_end(32);
  chunk.bytes = kChunkBytes;
  return chunk;
}

absl::Status PushPair::Send(LinkPush& push, int layer) {
  // Pieces of any size, from the middle of others.
  const auto all = absl::MakeConstSpan(bytes);
  const std::vector<absl::Span<const uint8_t>> pieces = {all.subspan(0, 100), all.subspan(100, 1),
                                                         all.subspan(101)};
  LinkPush::Chunk chunk = Chunk(layer);
  chunk.offset = static_cast<uint64_t>(layer);
  return push.Send({chunk}, pieces);
}

absl::Status PushPair::Land(LinkPush& push, int layer) {
  const absl::Status sent = Send(push, layer);
  return sent.ok() ? push.Finish() : sent;
}

void PushPair::PushWell() {
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

std::string PushPair::Link() {
  const auto peer = OrFail(peers->Enter(server->address()));
  return peer->link == nullptr ? "" : peer->id;
}

}  // namespace sluice::testing
