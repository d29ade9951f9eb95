#include "src/bench/ingest/ingest_source.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"
#include "src/bench/ingest/bench_certificate.h"
#include "src/prefill/held_prompts.h"
#include "src/service/access/access.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/pull/source_service.h"

namespace sluice::bench {
namespace {

// Returns the content of `bytes` as the caches of any prompt.
class CopiedCaches final : public Prefiller {
 public:
  CopiedCaches(const CacheLayout& layout, absl::Span<const uint8_t> bytes)
      : layout_(layout), bytes_(bytes) {}

  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&, bool,
                                    LayerSink& sink, const std::function<bool()>&) override {
    SLUICE_RETURN_IF_ERROR(sink.Begin());
    const auto tokens = static_cast<int>(prompt.size());
    for (int layer = 0; layer < layout_.layers; ++layer) {
      for (const CacheKind& kind : layout_.kinds) {
        auto left = static_cast<size_t>(kind.bytes_per_token * kind.heads * tokens);
        std::vector<absl::Span<const uint8_t>> pieces;
        while (left > 0) {
          pieces.push_back(bytes_.first(std::min(left, bytes_.size())));
          left -= pieces.back().size();
        }
        SLUICE_RETURN_IF_ERROR(sink.Layer(layer, kind, 0, tokens, pieces));
      }
    }
    return PrefillResult();
  }

 private:
  const CacheLayout layout_;
  const absl::Span<const uint8_t> bytes_;
};

class Source final : public IngestSource {
 public:
  Source(const SendJob& job, absl::Span<const uint8_t> bytes)
      : layout_(LayoutOf(job)), caches_(layout_, bytes) {}

  absl::Status Start(const SendJob& job) {
    HeldPrompts::Options options;
    options.layout = layout_;
    // Room for two: the next prompt may be held before the last reader of the previous one has let
    // go.
    options.max_bytes = 2 * static_cast<uint64_t>(layout_.BytesFor(job.context));
    held_ = std::make_unique<HeldPrompts>(std::move(options), &caches_);
    GrpcServer::Options server;
    server.listen = "127.0.0.1:0";
    if (const std::string folder = job.tls; !folder.empty()) {
      SLUICE_ASSIGN_OR_RETURN(access_, Access::Open(BenchAccessFile(folder), absl::Hours(1)));
      server.tls = BenchTlsFiles(folder);
      server.access = access_.get();
    }
    SourceServiceOptions service;
    service.model_fingerprint = job.fingerprint;
    service.layout = layout_;
    service.max_chunk_bytes = uint64_t{64} << 20;
    service.held = held_.get();
    service.access = access_.get();
    SLUICE_ASSIGN_OR_RETURN(server_, GrpcServer::Start(server, {NewSourceService(service)}));
    return absl::OkStatus();
  }

  absl::Status Hold(const SendJob& job, SendResult* result) override {
    HeldPrompts::Wanted wanted;
    wanted.prompt.assign(static_cast<size_t>(job.context), 1);
    SLUICE_ASSIGN_OR_RETURN(const HeldPrompts::Held held,
                            held_->Hold(wanted, [] { return false; }));
    SetText(server_->address(), &result->address);
    SetText(held.prompt->source_id, &result->source_id);
    result->payload_bytes = held.prompt->bytes;
    return absl::OkStatus();
  }

 private:
  const CacheLayout layout_;
  CopiedCaches caches_;
  std::unique_ptr<HeldPrompts> held_;
  std::unique_ptr<Access> access_;
  std::unique_ptr<GrpcServer> server_;  // Last member: its calls use the others.
};

}  // namespace

absl::StatusOr<std::unique_ptr<IngestSource>> IngestSource::Start(const SendJob& job,
                                                                  absl::Span<const uint8_t> bytes) {
  auto source = std::make_unique<Source>(job, bytes);
  SLUICE_RETURN_IF_ERROR(source->Start(job));
  return source;
}

}  // namespace sluice::bench
