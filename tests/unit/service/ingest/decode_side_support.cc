#include "tests/unit/service/ingest/decode_side_support.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/service/wire/status_mapping.h"

namespace sluice::testing {
namespace {

Buffer Arena(size_t bytes) {
  return Buffer(std::calloc(1, bytes), bytes, [](void* data, size_t) { std::free(data); });
}

// Returns the byte at `offset` of a layer's payload for a token range that begins at `token_begin`.
uint8_t ByteAt(int layer, int token_begin, size_t offset) {
  return static_cast<uint8_t>(layer * 131 + token_begin * 7 + static_cast<int>(offset % 8191) * 13 +
                              static_cast<int>(offset / 256));
}

}  // namespace

CacheKind DecodeSide::Kind() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 2;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 64);
  return kind;
}

std::string DecodeSide::LayerBytes(int layer, int token_begin, int token_end) {
  const CacheKind kind = Kind();
  std::string out(
      static_cast<size_t>((token_end - token_begin) * kind.bytes_per_token * kind.heads), '\0');
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<char>(ByteAt(layer, token_begin, i));
  }
  return out;
}

DecodeSide::DecodeSide(bool links) {
  const CacheLayout layout{kLayers, {Kind()}};
  hbm = *PagePool::Create("hbm", layout, Arena(1 << 20));
  dram = *PagePool::Create("dram", layout, Arena(1 << 20));
  TransferTable::Options options;
  options.model_fingerprint = "f00d";
  options.vocab_size = kVocab;
  options.max_context = kMaxContext;
  options.max_chunk_bytes = kMaxChunk;
  options.footprint = [](int64_t context, int64_t total) { return Footprint{context, total}; };
  table = std::make_unique<TransferTable>(options, dram.get(), hbm.get(), RealClock());
  IngestServiceOptions service = ServiceOptions();
  if (links) {
    LinkServer::Options ends;
    ends.links = NewCpuPeerLinks();
    ends.deadline = kLinkDeadline;
    link_server.emplace(std::move(ends));
    service.links = &*link_server;
  }
  service.link_message_bytes = kMaxChunk;
  auto started = GrpcServer::Start(ServerOptions("127.0.0.1:0"), {NewIngestService(service)});
  REQUIRE(started.ok());
  server = *std::move(started);
  stub = v1::KvIngest::NewStub(
      grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
}

IngestServiceOptions DecodeSide::ServiceOptions() {
  IngestServiceOptions service;
  service.vocab_size = kVocab;
  service.transfers = table.get();
  service.readiness = &readiness;
  service.metrics = &metrics;
  return service;
}

GrpcServer::Options DecodeSide::ServerOptions(const std::string& address) {
  GrpcServer::Options options;
  options.listen = address;
  options.max_receive_message_bytes = MaxChunkMessageBytes(kMaxChunk);
  return options;
}

absl::StatusOr<std::string> DecodeSide::Reserve(int context_length) {
  grpc::ClientContext context;
  v1::ReserveRequest request;
  v1::ReserveResponse response;
  v1::Manifest* manifest = request.mutable_manifest();
  manifest->set_model_fingerprint("f00d");
  manifest->set_context_length(static_cast<uint32_t>(context_length));
  for (int i = 0; i < context_length; ++i) manifest->add_prompt_token_ids(1);
  manifest->set_max_new_tokens(4);
  const grpc::Status status = stub->Reserve(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response.transfer_id();
}

v1::WriteRequest DecodeSide::Chunk(const std::string& id, int layer) {
  v1::WriteRequest chunk;
  v1::ChunkHeader* header = chunk.mutable_header();
  header->set_transfer_id(id);
  header->set_layer(static_cast<uint32_t>(layer));
  header->set_kind("kv");
  header->set_head_end(2);
  header->set_token_end(32);
  chunk.set_payload(LayerBytes(layer, 0, 32));
  header->set_crc32c(
      Crc32c({reinterpret_cast<const uint8_t*>(chunk.payload().data()), chunk.payload().size()}));
  return chunk;
}

absl::Status DecodeSide::Write(const std::vector<v1::WriteRequest>& chunks,
                               v1::WriteResponse* response) {
  grpc::ClientContext context;
  v1::WriteResponse ignored;
  auto writer = stub->Write(&context, response != nullptr ? response : &ignored);
  for (const v1::WriteRequest& chunk : chunks) {
    if (!writer->Write(chunk)) break;
  }
  writer->WritesDone();
  return FromGrpcStatus(writer->Finish());
}

grpc::Status DecodeSide::Commit(const std::string& id) {
  grpc::ClientContext context;
  v1::CommitRequest request;
  v1::CommitResponse response;
  request.set_transfer_id(id);
  return stub->Commit(&context, request, &response);
}

ReadySequence DecodeSide::Take(const std::string& id) {
  HandoffRef ref;
  ref.transfer_id = id;
  const auto attached = table->Attach(ref);
  REQUIRE(attached.ok());
  auto ready = table->TakeReady(*attached);
  REQUIRE(ready.ok());
  REQUIRE(ready->has_value());
  return *std::move(*ready);
}

void DecodeSide::CheckHome(const SequenceCache& home, int tokens) {
  const CacheKind kind = Kind();
  for (int chunk = 0; chunk < tokens; chunk += 64) {
    const int chunk_end = std::min(chunk + 64, tokens);
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string want = LayerBytes(layer, chunk, chunk_end);
      size_t offset = 0;
      for (int begin = chunk; begin < chunk_end; begin += kind.block_tokens) {
        const int count = std::min(kind.block_tokens, chunk_end - begin);
        const auto part = static_cast<size_t>(count * kind.part_bytes[0]);
        for (int head = 0; head < kind.heads; ++head) {
          const uint8_t* block = home.BlockAddress(layer, 0, head, begin / kind.block_tokens);
          for (int p = 0; p < 2; ++p) {
            INFO("layer " << layer << " token " << begin << " head " << head << " part " << p);
            REQUIRE(std::memcmp(block + p * kind.block_bytes() / 2, want.data() + offset, part) ==
                    0);
            offset += part;
          }
        }
      }
    }
  }
}

}  // namespace sluice::testing
