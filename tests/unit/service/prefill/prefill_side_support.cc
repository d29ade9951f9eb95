#include "tests/unit/service/prefill/prefill_side_support.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "tests/unit/service/ingest/decode_side_support.h"

namespace sluice::testing {

struct FakePrefiller::Part {
  Part(int of_layer, int from, int to)
      : layer(of_layer), begin(from), end(to), bytes(DecodeSide::LayerBytes(layer, begin, end)) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    for (size_t at = 0, size = 1; at < bytes.size(); at += size, size = size * 3 % 1000 + 1) {
      pieces.emplace_back(data + at, std::min(size, bytes.size() - at));
      size = pieces.back().size();
    }
  }
  absl::Status Give(LayerSink& sink) const {
    return sink.Layer(layer, DecodeSide::Kind(), begin, end, pieces);
  }
  const int layer, begin, end;
  const std::string bytes;
  std::vector<absl::Span<const uint8_t>> pieces;
};

absl::Status FakePrefiller::GiveAll(const std::deque<Part>& parts, LayerSink& sink) {
  for (const Part& part : parts) SLUICE_RETURN_IF_ERROR(part.Give(sink));
  return absl::OkStatus();
}

absl::StatusOr<PrefillResult> FakePrefiller::Run(const std::vector<int32_t>& prompt,
                                                 const SamplingParams&, bool want_first_token,
                                                 LayerSink& sink,
                                                 const std::function<bool()>& cancelled) {
  if (const absl::Status begun = sink.Begin(); !begun.ok()) return begun;
  ++runs;
  std::deque<Part> parts;  // a sink may read them until it is flushed
  bool on_device = sink.OnDevice();
  const auto length = static_cast<int>(prompt.size());
  const absl::Status given = [&]() -> absl::Status {
    for (int begin = 0; begin < length; begin += 64) {
      for (int layer = 0; layer < DecodeSide::kLayers; ++layer) {
        if (before_layer) before_layer(layer);
        if (cancelled()) return absl::CancelledError("cancelled");
        parts.emplace_back(layer, begin, std::min(begin + 64, length));
        const Part& part = parts.back();
        if (!on_device) {
          SLUICE_RETURN_IF_ERROR(part.Give(sink));
          continue;
        }
        SLUICE_ASSIGN_OR_RETURN(on_device, sink.LayerOnDevice(part.layer, DecodeSide::Kind(),
                                                              part.begin, part.end, part.pieces));
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

PrefillSide::PrefillSide(int threads, size_t max_queued, uint64_t max_kept_bytes, bool links) {
  PrefillServiceOptions options;
  v1::ModelInfo* model = options.model.mutable_model();
  model->set_fingerprint("f00d");
  model->set_vocab_size(DecodeSide::kVocab);
  model->set_max_context(DecodeSide::kMaxContext);
  *model->add_cache_kinds() = ToProto(DecodeSide::Kind());
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
    ends.deadline = DecodeSide::kLinkDeadline;
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

absl::Status PrefillSide::Run(const v1::RunRequest& request, v1::RunResponse* response) {
  grpc::ClientContext context;
  return FromGrpcStatus(stub->Run(&context, request, response));
}

v1::RunRequest PromptOf(int tokens, const std::string& decode_address) {
  v1::RunRequest request;
  for (int i = 0; i < tokens; ++i) {
    request.add_prompt_token_ids(static_cast<uint32_t>(i) % DecodeSide::kVocab);
  }
  request.set_decode_address(decode_address);
  request.set_rendezvous_key("room");
  return request;
}

}  // namespace sluice::testing
