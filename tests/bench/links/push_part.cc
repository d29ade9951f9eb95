// Whole pushes: one process pushes as a prefill node does, and the other takes them as a decode
// node does. Nobody computes anything.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/readiness.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/kv_pusher.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"
#include "src/service/wire/status_mapping.h"
#include "tests/bench/links/link_bench.h"
#include "tests/support/links.h"

namespace sluice::bench {
namespace {

// Serves a decode node's side of pushes.
absl::Status Take(Process& process) {
  Metrics metrics;
  Readiness readiness;
  SLUICE_ASSIGN_OR_RETURN(const Home dram, NewHome(process.flags(), process.device()));
  TransferTable::Options options = TableOptions(process.flags(), dram);
  options.max_chunk_bytes = kChunkBytes;
  TransferTable table(options, dram[0].get(), dram[0].get(), RealClock());
  table.SetWake([] {});
  LinkServer::Options ends;
  SLUICE_ASSIGN_OR_RETURN(ends.links, testing::TestPeerLinks(&process.device()));
  LinkServer links(std::move(ends));
  IngestServiceOptions service;
  service.vocab_size = options.vocab_size;
  service.transfers = &table;
  service.readiness = &readiness;
  service.metrics = &metrics;
  service.links = &links;
  service.link_message_bytes = LinkMessageBytes(kChunkBytes, links.links());
  GrpcServer::Options listen;
  listen.listen = "127.0.0.1:0";
  listen.max_receive_message_bytes = MaxChunkMessageBytes(kChunkBytes);
  SLUICE_ASSIGN_OR_RETURN(const auto server,
                          GrpcServer::Start(listen, {NewIngestService(service)}));
  process.Leave(server->address());
  process.Meet();  // it serves
  process.Meet();  // everything was pushed
  return absl::OkStatus();
}

// Returns a layer's part of a chunk as it lies in a prefill node's HBM: in pages, of which no two
// neighbours follow one another.
std::vector<absl::Span<const uint8_t>> Pages(const Buffer& layer, int tokens) {
  const CacheKind kind = Layout().kinds[0];
  std::vector<absl::Span<const uint8_t>> pieces;
  const int64_t pages = kind.BlocksFor(tokens) * kind.heads;
  for (int64_t i = 0; i < pages; ++i) {
    const int64_t token = i % kind.BlocksFor(tokens) * kind.block_tokens;
    const int64_t count = std::min<int64_t>(kind.block_tokens, tokens - token);
    pieces.emplace_back(
        layer.as<uint8_t>() + (pages - 1 - i) * kind.bytes_per_token * kind.block_tokens,
        static_cast<size_t>(kind.bytes_per_token * count));
  }
  return pieces;
}

// Pushes as a prefill node that computes nothing: chunks of 512 tokens, layer by layer.
absl::Status Push(Process& process) {
  constexpr int kStep = 512;
  const Flags& flags = process.flags();
  Device& device = process.device();
  const CacheLayout layout = Layout();
  const CacheKind& kind = layout.kinds[0];
  const auto bytes = static_cast<size_t>(layout.BytesFor(flags.tokens));
  const auto layer_bytes = static_cast<size_t>(layout.BytesFor(kStep) / layout.layers);
  // A link sends from where the layer was computed; for gRPC the node has copied it by then.
  SLUICE_ASSIGN_OR_RETURN(const Buffer hbm,
                          device.Allocate(MemoryKind::kDevice, layer_bytes, "a layer"));
  SLUICE_ASSIGN_OR_RETURN(const Buffer staging,
                          device.Allocate(MemoryKind::kPinned, layer_bytes, "a layer"));
  std::memset(staging.data(), 3, staging.bytes());
  LinkPeers::Options ends;
  SLUICE_ASSIGN_OR_RETURN(ends.links, testing::TestPeerLinks(&device));
  ends.sends = true;
  LinkPeers peers(std::move(ends));
  process.Meet();
  Channels channels;
  const std::string address = process.Left();
  const auto stub = v1::KvIngest::NewStub(channels.Get(address));
  const auto context = [] { return std::make_unique<grpc::ClientContext>(); };
  for (const bool by_link : {false, true}) {
    std::vector<absl::Duration> times;
    for (int round = 0; round <= flags.rounds; ++round) {  // the first one makes the link
      v1::ReserveRequest reserve;
      v1::ReserveResponse reserved;
      v1::Manifest& manifest = *reserve.mutable_manifest();
      manifest.set_model_fingerprint(Fingerprint());
      manifest.set_context_length(static_cast<uint32_t>(flags.tokens));
      for (int i = 0; i < flags.tokens; ++i) manifest.add_prompt_token_ids(7);
      manifest.set_max_new_tokens(1);
      SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub->Reserve(context().get(), reserve, &reserved)));
      KvPusher::Options options;
      options.transfer_id = reserved.transfer_id();
      options.max_chunk_bytes = reserved.max_chunk_bytes();
      options.stream_context = options.call_context = options.link_context = context;
      options.links = by_link ? &peers : nullptr;
      options.address = address;
      KvPusher pusher(stub.get(), std::move(options));
      const absl::Time begin = absl::Now();
      for (int token = 0; token < flags.tokens; token += kStep) {
        const int end = std::min(token + kStep, flags.tokens);
        const std::vector<absl::Span<const uint8_t>> pieces =
            by_link ? Pages(hbm, end - token)
                    : std::vector{absl::Span<const uint8_t>(
                          staging.as<uint8_t>(),
                          static_cast<size_t>(kind.bytes_per_token * kind.heads * (end - token)))};
        for (int layer = 0; layer < layout.layers; ++layer) {
          if (pusher.OnDevice()) {
            SLUICE_RETURN_IF_ERROR(pusher.LayerOnDevice(layer, kind, token, end, pieces).status());
          } else if (!by_link) {
            SLUICE_RETURN_IF_ERROR(pusher.Layer(layer, kind, token, end, pieces,
                                                {0, static_cast<uint32_t>(kind.heads)}));
          }
        }
      }
      SLUICE_RETURN_IF_ERROR(pusher.FlushDevice().status());
      SLUICE_RETURN_IF_ERROR(pusher.Finish());
      if (round > 0) times.push_back(absl::Now() - begin);
      if (by_link && pusher.bytes_by_link() != bytes) {
        return absl::InternalError("not everything went over the link");
      }
      v1::AbortRequest abort;
      v1::AbortResponse aborted;
      abort.set_transfer_id(reserved.transfer_id());
      SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub->Abort(context().get(), abort, &aborted)));
    }
    Print(by_link ? "push over the link, HBM to pinned DRAM"
                  : "push over gRPC, pinned to pinned DRAM",
          bytes, times);
  }
  process.Meet();
  return absl::OkStatus();
}

}  // namespace

absl::Status TimePushes(Process& process) {
  return process.sends() ? Push(process) : Take(process);
}

}  // namespace sluice::bench
