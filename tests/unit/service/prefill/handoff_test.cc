// Tests KvIngest and Prefill over real connections: a fake prefiller pushes known bytes into a real
// transfer table, as a prefill node does into a decode node.
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "sluice/v1/prefill.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/kv_pusher.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"
#include "src/service/prefill/prefill_service.h"
#include "src/service/wire/chunking.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "tests/support/eventually.h"

namespace sluice {
namespace {

constexpr int kLayers = 3;
constexpr uint32_t kVocab = 100;
constexpr uint32_t kMaxContext = 256;
constexpr uint64_t kMaxChunk = 8192;

CacheKind Kind() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 2;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 64);
  return kind;
}

Buffer Arena(size_t bytes) {
  return Buffer(std::calloc(1, bytes), bytes, [](void* data, size_t) { std::free(data); });
}

// Returns the byte at `offset` of a layer's payload for a token range that begins at `token_begin`.
uint8_t ByteAt(int layer, int token_begin, size_t offset) {
  return static_cast<uint8_t>(layer * 131 + token_begin * 7 + static_cast<int>(offset % 8191) * 13 +
                              static_cast<int>(offset / 256));
}

std::string LayerBytes(int layer, int token_begin, int token_end) {
  const CacheKind kind = Kind();
  std::string out(
      static_cast<size_t>((token_end - token_begin) * kind.bytes_per_token * kind.heads), '\0');
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<char>(ByteAt(layer, token_begin, i));
  }
  return out;
}

constexpr absl::Duration kLinkDeadline = absl::Seconds(1);

struct DecodeSide {
  explicit DecodeSide(bool links = false) {
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
    if (links) {
      LinkServer::Options ends;
      ends.links = NewCpuPeerLinks();
      ends.deadline = kLinkDeadline;
      link_server.emplace(std::move(ends));
    }
    IngestServiceOptions service;
    service.vocab_size = kVocab;
    service.transfers = table.get();
    service.readiness = &readiness;
    service.metrics = &metrics;
    service.links = links ? &*link_server : nullptr;
    service.link_message_bytes = kMaxChunk;
    GrpcServer::Options server_options;
    server_options.listen = "127.0.0.1:0";
    server_options.max_receive_message_bytes = MaxChunkMessageBytes(kMaxChunk);
    auto started = GrpcServer::Start(server_options, {NewIngestService(service)});
    REQUIRE(started.ok());
    server = *std::move(started);
    stub = v1::KvIngest::NewStub(
        grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  }

  absl::StatusOr<std::string> Reserve(int context_length) {
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
  // Returns one layer's chunk of tokens [0, 32), both heads.
  static v1::WriteRequest Chunk(const std::string& id, int layer) {
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
  absl::Status Write(const std::vector<v1::WriteRequest>& chunks,
                     v1::WriteResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::WriteResponse ignored;
    auto writer = stub->Write(&context, response != nullptr ? response : &ignored);
    for (const v1::WriteRequest& chunk : chunks) {
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    return FromGrpcStatus(writer->Finish());
  }
  grpc::Status Commit(const std::string& id) {
    grpc::ClientContext context;
    v1::CommitRequest request;
    v1::CommitResponse response;
    request.set_transfer_id(id);
    return stub->Commit(&context, request, &response);
  }

  Metrics metrics;
  Readiness readiness;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<TransferTable> table;
  std::optional<LinkServer> link_server;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::KvIngest::Stub> stub;
};

TEST_CASE("a bad chunk ends its stream, names what is wrong, and the next stream works") {
  DecodeSide decode;
  const auto id = decode.Reserve(32);
  REQUIRE(id.ok());
  v1::WriteRequest corrupt = DecodeSide::Chunk(*id, 0);
  (*corrupt.mutable_payload())[5] ^= 1;
  CHECK(absl::IsDataLoss(decode.Write({corrupt, DecodeSide::Chunk(*id, 1)})));
  v1::WriteRequest short_one = DecodeSide::Chunk(*id, 0);
  short_one.mutable_payload()->pop_back();
  CHECK(absl::IsInvalidArgument(decode.Write({short_one})));
  CHECK(absl::IsNotFound(decode.Write({DecodeSide::Chunk(std::string(32, '0'), 0)})));
  v1::WriteRequest no_header;
  no_header.set_payload("x");
  CHECK(FieldOf(decode.Write({no_header})) == "header");

  v1::WriteResponse response;
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 0), DecodeSide::Chunk(*id, 2)}, &response).ok());
  CHECK(response.blocks_landed() == 4);
  CHECK(response.blocks_missing() == 2);
  const std::string metrics = decode.metrics.Render();
  CHECK_THAT(metrics, Catch::Contains("sluice_ingest_checksum_failures_total 1"));
  CHECK_THAT(metrics, Catch::Contains("sluice_ingest_blocks_total 4"));
}

TEST_CASE("Commit with blocks missing lists them, and succeeds once they are sent") {
  DecodeSide decode;
  const auto id = decode.Reserve(32);
  REQUIRE(id.ok());
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 2), DecodeSide::Chunk(*id, 0)}).ok());
  const grpc::Status status = decode.Commit(*id);
  CHECK(status.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  v1::MissingBlocks missing;
  REQUIRE(DetailOf(status, &missing));
  CHECK(missing.count() == 2);
  REQUIRE(missing.ranges_size() >= 1);
  CHECK(missing.ranges(0).layer() == 1);
  CHECK(missing.ranges(0).token_end() == 32);
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 1)}).ok());
  CHECK(decode.Commit(*id).ok());
  CHECK(decode.Commit(*id).ok());  // idempotent
  CHECK_THAT(decode.metrics.Render(), Catch::Contains("sluice_ingest_seconds_count 1"));
}

TEST_CASE("a draining node refuses Reserve and says why") {
  DecodeSide decode;
  decode.readiness.SetDraining(true);
  const auto id = decode.Reserve(32);
  CHECK(absl::IsUnavailable(id.status()));
  CHECK(ReasonOf(id.status()) == "DRAINING");
}

TEST_CASE("a port that is in use is refused in one sentence that says so") {
  DecodeSide decode;
  GrpcServer::Options options;
  options.listen = decode.server->address();
  const auto second = GrpcServer::Start(options, {});
  REQUIRE_FALSE(second.ok());
  CHECK_THAT(std::string(second.status().message()),
             Catch::Contains(options.listen) && Catch::Contains("in use"));
}

// Gives LayerBytes() in chunks of 64 tokens, in pieces that begin and end anywhere.
class FakePrefiller : public Prefiller {
 public:
  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&,
                                    bool want_first_token, LayerSink& sink,
                                    const std::function<bool()>& cancelled) override {
    if (const absl::Status begun = sink.Begin(); !begun.ok()) return begun;
    ++runs;
    std::deque<Part> parts;  // a sink may read them until it is flushed
    bool on_device = sink.OnDevice();
    const auto length = static_cast<int>(prompt.size());
    const absl::Status given = [&]() -> absl::Status {
      for (int begin = 0; begin < length; begin += 64) {
        for (int layer = 0; layer < kLayers; ++layer) {
          if (before_layer) before_layer(layer);
          if (cancelled()) return absl::CancelledError("cancelled");
          parts.emplace_back(layer, begin, std::min(begin + 64, length));
          const Part& part = parts.back();
          if (!on_device) {
            SLUICE_RETURN_IF_ERROR(part.Give(sink));
            continue;
          }
          SLUICE_ASSIGN_OR_RETURN(
              on_device, sink.LayerOnDevice(part.layer, Kind(), part.begin, part.end, part.pieces));
          if (!on_device) SLUICE_RETURN_IF_ERROR(GiveAll(parts, sink));
        }
      }
      return absl::OkStatus();
    }();
    if (on_device) {
      const absl::StatusOr<bool> arrived = sink.FlushDevice();
      if (given.ok() && !arrived.ok()) return arrived.status();
      if (given.ok() && !*arrived) SLUICE_RETURN_IF_ERROR(GiveAll(parts, sink));
    }
    if (!given.ok()) return given;
    if (!result.ok()) return result;
    PrefillResult out;
    out.compute = absl::Milliseconds(5);
    if (want_first_token) out.first_token = OutputToken{42, -0.25f, {{42, -0.25f}}};
    return out;
  }
  std::atomic<int> runs = 0;
  std::function<void(int)> before_layer;
  absl::Status result;

 private:
  struct Part {
    Part(int of_layer, int from, int to)
        : layer(of_layer), begin(from), end(to), bytes(LayerBytes(layer, begin, end)) {
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
      for (size_t at = 0, size = 1; at < bytes.size(); at += size, size = size * 3 % 1000 + 1) {
        pieces.emplace_back(data + at, std::min(size, bytes.size() - at));
        size = pieces.back().size();
      }
    }
    absl::Status Give(LayerSink& sink) const {
      return sink.Layer(layer, Kind(), begin, end, pieces);
    }
    const int layer, begin, end;
    const std::string bytes;
    std::vector<absl::Span<const uint8_t>> pieces;
  };
  static absl::Status GiveAll(const std::deque<Part>& parts, LayerSink& sink) {
    for (const Part& part : parts) SLUICE_RETURN_IF_ERROR(part.Give(sink));
    return absl::OkStatus();
  }
};

struct PrefillSide {
  explicit PrefillSide(int threads = 2, size_t max_queued = 8,
                       uint64_t max_kept_bytes = kMaxKeptBytes, bool links = false) {
    PrefillServiceOptions options;
    v1::ModelInfo* model = options.model.mutable_model();
    model->set_fingerprint("f00d");
    model->set_vocab_size(kVocab);
    model->set_max_context(kMaxContext);
    *model->add_cache_kinds() = ToProto(Kind());
    options.prefiller = &prefiller;
    options.readiness = &readiness;
    options.channels = &channels;
    options.metrics = &metrics;
    options.counts = &counts;
    options.threads = threads;
    options.max_queued = max_queued;
    options.call_timeout = absl::Seconds(3);
    options.max_kept_bytes = max_kept_bytes;
    if (links) {
      LinkPeers::Options ends;
      ends.links = NewCpuPeerLinks();
      ends.sends = true;
      ends.deadline = kLinkDeadline;
      peers.emplace(std::move(ends));
      options.links = &*peers;
    }
    GrpcServer::Options server_options;
    server_options.listen = "127.0.0.1:0";
    auto started = GrpcServer::Start(server_options, {NewPrefillService(options)});
    REQUIRE(started.ok());
    server = *std::move(started);
    stub = v1::Prefill::NewStub(
        grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  }
  absl::Status Run(const v1::RunRequest& request, v1::RunResponse* response) {
    grpc::ClientContext context;
    return FromGrpcStatus(stub->Run(&context, request, response));
  }

  FakePrefiller prefiller;
  Readiness readiness;
  Channels channels;
  Metrics metrics;
  PromptCounts counts{&metrics};
  std::optional<LinkPeers> peers;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::Prefill::Stub> stub;
};

v1::RunRequest PromptOf(int tokens, const std::string& decode_address) {
  v1::RunRequest request;
  for (int i = 0; i < tokens; ++i) request.add_prompt_token_ids(static_cast<uint32_t>(i) % kVocab);
  request.set_decode_address(decode_address);
  request.set_rendezvous_key("room");
  return request;
}

// Takes the committed transfer, through the engine's side of the table.
ReadySequence Take(DecodeSide& decode, const std::string& id) {
  HandoffRef ref;
  ref.transfer_id = id;
  const auto attached = decode.table->Attach(ref);
  REQUIRE(attached.ok());
  auto ready = decode.table->TakeReady(*attached);
  REQUIRE(ready.ok());
  REQUIRE(ready->has_value());
  return *std::move(*ready);
}

// Checks that every byte of the caches lies where the host cache's layout says.
void CheckHome(const SequenceCache& home, int tokens) {
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

TEST_CASE("a prompt is handed over byte for byte, with its first token") {
  DecodeSide decode;
  PrefillSide prefill;
  const int tokens = GENERATE(1, 31, 64, 150);
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(tokens, decode.server->address()), &response);
  INFO(status.ToString());
  REQUIRE(status.ok());
  CHECK(response.first_token().id() == 42);
  CHECK(response.first_token().logprob() == -0.25f);
  CHECK(response.timings().bytes_pushed() == static_cast<uint64_t>(tokens) * 64 * 2 * kLayers);
  const ReadySequence ready = Take(decode, response.transfer_id());
  CHECK(ready.context_length == static_cast<uint32_t>(tokens));
  CHECK(ready.prompt.size() == static_cast<size_t>(tokens));
  CHECK(ready.max_new_tokens == kMaxContext - static_cast<uint32_t>(tokens));
  REQUIRE(ready.first_tokens.size() == 1);
  CHECK(ready.first_tokens[0].id == 42);
  CheckHome(*ready.home, tokens);
}

// Returns what a prefill node's pushes came to.
std::string Pushed(const PrefillSide& prefill, const std::string& name, const std::string& label) {
  const std::string metrics = prefill.metrics.Render();
  const std::string front = name + "{" + label + "} ";
  const size_t at = metrics.find(front);
  REQUIRE(at != std::string::npos);
  return metrics.substr(at + front.size(), metrics.find('\n', at) - at - front.size());
}
const std::string kWrites = "sluice_push_link_writes_total";
const std::string kPushBytes = "sluice_push_bytes_total";
constexpr int kTokens = 150;
const std::string kAllBytes = std::to_string(kTokens * 64 * 2 * kLayers);

TEST_CASE("a prompt is handed over by link where both nodes have links", "[links]") {
  const bool decode_has = GENERATE(true, false);
  DecodeSide decode(decode_has);
  PrefillSide prefill(2, 8, kMaxKeptBytes, /*links=*/true);
  for (int round = 0; round < 2; ++round) {
    v1::RunResponse response;
    const absl::Status status = prefill.Run(PromptOf(kTokens, decode.server->address()), &response);
    INFO(status.ToString());
    REQUIRE(status.ok());
    CHECK(std::to_string(response.timings().bytes_pushed()) == kAllBytes);
    CheckHome(*Take(decode, response.transfer_id()).home, kTokens);
    if (round == 0) {
      CHECK(Pushed(prefill, kPushBytes,
                   decode_has ? "transport=\"shared_memory\"" : "transport=\"grpc\"") == kAllBytes);
    }
  }
  CHECK(Pushed(prefill, kWrites, "outcome=\"done\"") == (decode_has ? "2" : "0"));
  CHECK(Pushed(prefill, kWrites, "outcome=\"refused\"") == (decode_has ? "0" : "2"));
}

#ifndef SLUICE_NO_FAILPOINTS
TEST_CASE("what a link left goes over gRPC, without computing again", "[links]") {
  const std::string terms = GENERATE(as<std::string>{}, "link.send=error*1@3", "link.send=error*1",
                                     "ingest.checksum=error*1@3");
  INFO(terms);
  DecodeSide decode(/*links=*/true);
  PrefillSide prefill(2, 8, kMaxKeptBytes, /*links=*/true);
  {
    ScopedFailpoints armed(terms);
    v1::RunResponse response;
    const absl::Status status = prefill.Run(PromptOf(kTokens, decode.server->address()), &response);
    INFO(status.ToString());
    REQUIRE(status.ok());
    CheckHome(*Take(decode, response.transfer_id()).home, kTokens);
  }
  CHECK(prefill.prefiller.runs == 1);
  CHECK(Pushed(prefill, kWrites, "outcome=\"broken\"") == "1");
  v1::RunResponse response;
  REQUIRE(prefill.Run(PromptOf(kTokens, decode.server->address()), &response).ok());
  CHECK(Pushed(prefill, kWrites, "outcome=\"done\"") == "1");
}
#endif

TEST_CASE("without a first token none is handed over, and max_tokens is what is reserved") {
  DecodeSide decode;
  PrefillSide prefill;
  v1::RunRequest request = PromptOf(40, decode.server->address());
  request.set_skip_first_token(true);
  request.mutable_sampling()->set_max_tokens(7);
  v1::RunResponse response;
  REQUIRE(prefill.Run(request, &response).ok());
  CHECK_FALSE(response.has_first_token());
  const ReadySequence ready = Take(decode, response.transfer_id());
  CHECK(ready.first_tokens.empty());
  CHECK(ready.max_new_tokens == 7);
}

TEST_CASE("the decode node's refusals keep their details and name its address") {
  DecodeSide decode;
  PrefillSide prefill;
  decode.readiness.SetDraining(true);
  v1::RunResponse response;
  const std::string address = decode.server->address();
  const absl::Status status = prefill.Run(PromptOf(4, address), &response);
  CHECK(absl::IsUnavailable(status));
  CHECK(ReasonOf(status) == "DRAINING");
  CHECK_THAT(std::string(status.message()), Catch::StartsWith("decode node " + address));
  CHECK(prefill.prefiller.runs == 0);  // refused before anything was computed
}

TEST_CASE("a prompt that fails gives the decode node its memory back") {
  DecodeSide decode;
  PrefillSide prefill;
  prefill.prefiller.result =
      ResourceExhausted("NO_HBM", "too long for this node", absl::Seconds(1));
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(100, decode.server->address()), &response);
  CHECK(ReasonOf(status) == "NO_HBM");
  CHECK(status.message() == "too long for this node");
  CHECK(decode.table->open_transfers() == 0);
  CHECK(decode.dram->UsageOf(0).reserved_bytes == 0);
}

TEST_CASE("a caller that goes away ends the computation and the transfer") {
  DecodeSide decode;
  PrefillSide prefill;
  std::atomic<bool> computing = false;
  std::atomic<bool> go_on = false;
  prefill.prefiller.before_layer = [&](int layer) {
    if (layer != 1) return;
    computing = true;
    while (!go_on) absl::SleepFor(absl::Milliseconds(1));
  };
  grpc::ClientContext context;
  std::thread caller([&] {
    v1::RunResponse response;
    const grpc::Status status =
        prefill.stub->Run(&context, PromptOf(100, decode.server->address()), &response);
    CHECK(status.error_code() == grpc::StatusCode::CANCELLED);
  });
  while (!computing) absl::SleepFor(absl::Milliseconds(1));
  CHECK(decode.table->open_transfers() == 1);
  context.TryCancel();
  caller.join();
  absl::SleepFor(absl::Milliseconds(500));  // until its server knows
  go_on = true;
  CHECK(testing::Eventually(absl::Seconds(3), [&] { return decode.table->open_transfers() == 0; }));
}

TEST_CASE("bad requests name the field, and nobody is called") {
  PrefillSide prefill;
  v1::RunResponse response;
  const auto field = [&](const v1::RunRequest& request) {
    const absl::Status status = prefill.Run(request, &response);
    CHECK(absl::IsInvalidArgument(status));
    return FieldOf(status).value_or("none");
  };
  CHECK(field(PromptOf(0, "127.0.0.1:1")) == "prompt_token_ids");
  CHECK(field(PromptOf(300, "127.0.0.1:1")) == "prompt_token_ids");
  CHECK(field(PromptOf(3, "")) == "decode_address");
  CHECK(field(PromptOf(3, "unix:/etc/passwd")) == "decode_address");
  CHECK(field(PromptOf(3, "127.0.0.1:0")) == "decode_address");
  v1::RunRequest request = PromptOf(3, "127.0.0.1:1");
  request.set_prompt_token_ids(2, kVocab);
  CHECK(field(request) == "prompt_token_ids[2]");
  request = PromptOf(3, "127.0.0.1:1");
  request.mutable_sampling()->set_top_p(2);
  CHECK(field(request) == "sampling.top_p");
  request = PromptOf(3, "127.0.0.1:1");
  request.set_tenant(std::string(129, 'x'));
  CHECK(field(request) == "tenant");
}

TEST_CASE("a decode node that is not there is UNAVAILABLE with its address") {
  PrefillSide prefill;
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(3, "127.0.0.1:1"), &response);
  CHECK(absl::IsUnavailable(status));
  CHECK_THAT(std::string(status.message()), Catch::StartsWith("decode node 127.0.0.1:1: "));
}

TEST_CASE("a full queue refuses with a time to try again") {
  DecodeSide decode;
  PrefillSide prefill(/*threads=*/1, /*max_queued=*/1);
  std::atomic<bool> go_on = false;
  prefill.prefiller.before_layer = [&](int) {
    while (!go_on) absl::SleepFor(absl::Milliseconds(1));
  };
  std::atomic<int> served = 0;
  std::atomic<int> refused = 0;
  const auto call = [&] {
    v1::RunRequest request = PromptOf(3, decode.server->address());
    request.clear_rendezvous_key();
    v1::RunResponse response;
    const absl::Status status = prefill.Run(request, &response);
    if (status.ok()) {
      ++served;
    } else if (ReasonOf(status) == "QUEUE_FULL" && RetryAfterOf(status) > absl::ZeroDuration()) {
      ++refused;
    }
  };
  // One call computes. Of the three that come then, one waits and two are refused.
  std::vector<std::thread> callers;
  callers.emplace_back(call);
  while (prefill.prefiller.runs == 0) absl::SleepFor(absl::Milliseconds(1));
  for (int i = 0; i < 3; ++i) callers.emplace_back(call);
  CHECK(testing::Eventually(absl::Seconds(5), [&] { return refused == 2; }));
  go_on = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(served == 2);
  CHECK(refused == 2);
}

TEST_CASE("a broken push resumes from what has landed, on a new connection") {
  DecodeSide decode;
  // If `kept`, the sent chunks are kept and sent again; otherwise the prompt is computed once
  // more.
  const bool kept = GENERATE(true, false);
  INFO((kept ? "kept" : "not kept"));
  PrefillSide prefill(2, 8, kept ? kMaxKeptBytes : 0);
  // The decode node's server stops in the middle of the push and comes back on the same port.
  std::atomic<int> layers = 0;
  prefill.prefiller.before_layer = [&](int) {
    if (++layers != 5) return;
    IngestServiceOptions service;
    service.vocab_size = kVocab;
    service.transfers = decode.table.get();
    service.readiness = &decode.readiness;
    service.metrics = &decode.metrics;
    GrpcServer::Options options;
    options.listen = decode.server->address();
    options.max_receive_message_bytes = MaxChunkMessageBytes(kMaxChunk);
    decode.server.reset();
    // gRPC closes the old listener in its own time.
    REQUIRE(testing::Eventually(absl::Seconds(5), [&] {
      auto again = GrpcServer::Start(options, {NewIngestService(service)});
      if (again.ok()) decode.server = *std::move(again);
      return again.ok();
    }));
  };
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(150, decode.server->address()), &response);
  INFO(status.ToString());
  REQUIRE(status.ok());
  // Without `kept` the prompt is computed again, unless everything sent had landed before the
  // connection broke.
  CHECK(prefill.prefiller.runs <= (kept ? 1 : 2));
  const ReadySequence ready = Take(decode, response.transfer_id());
  CheckHome(*ready.home, 150);
}

}  // namespace
}  // namespace sluice
