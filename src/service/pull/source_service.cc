#include "src/service/pull/source_service.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "sluice/v1/source.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/access/caller.h"
#include "src/service/links/link_server.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/chunking.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// The limit is for one Read, whose every chunk is compared with every range: a few thousand chunks
// and a few thousand ranges take tens of milliseconds. A reader that misses more asks for
// everything.
constexpr int kMaxRanges = 4096;
// The chunks of one ReadByLink. Their headers take some 2 MB.
constexpr size_t kMaxLinkChunks = 32768;

absl::Status NoSuchSource(const std::string& id) {
  return WithReason(absl::NotFoundError(
                        absl::StrCat("source_id '", id.substr(0, 64),
                                     "': no such prompt is held here: it never was, was released, "
                                     "or its lease has ended; compute it again")),
                    reasons::kSourceNotFound);
}

// Checks the names in a request that say which source it means, and returns the tenant that the
// caller acts for.
template <typename Message>
absl::StatusOr<std::string> TenantOf(const SourceServiceOptions& options,
                                     const grpc::CallbackServerContext& context,
                                     const Message& request) {
  if constexpr (std::is_same_v<Message, v1::AwaitPromptRequest>) {
    SLUICE_RETURN_IF_ERROR(CheckName("reader", request.reader()));
    if (request.reader().empty()) return InvalidField("reader", "is empty");
    // because it is kept
    SLUICE_RETURN_IF_ERROR(CheckName("prompt_digest", request.prompt_digest()));
  } else {
    SLUICE_RETURN_IF_ERROR(CheckName("source_id", request.source_id()));
  }
  SLUICE_RETURN_IF_ERROR(CheckName("tenant", request.tenant()));
  return TenantFor(CallerOf(options.access, context), request.tenant());
}

struct Chunk {
  const HeldLayer* layer = nullptr;
  ChunkPlan plan;
};

// Returns the tokens of a layer, in whole blocks, from the first to the last that a range has; all
// of them if there are no ranges.
std::pair<int, int> Wanted(const HeldLayer& layer, const CacheKind& kind,
                           const std::vector<MissingRange>& ranges) {
  if (ranges.empty()) return {0, layer.tokens};
  int begin = layer.tokens, end = 0;
  for (const MissingRange& range : ranges) {
    if (range.layer != static_cast<uint32_t>(layer.layer) || range.kind != kind.name) continue;
    const auto blocks = static_cast<int>(kind.BlocksFor(range.token_end));
    begin = std::min(begin, static_cast<int>(range.token_begin));
    end = std::max(end, std::min(blocks * kind.block_tokens, layer.tokens));
  }
  return {begin, end};
}

// Returns every chunk that has part of a range. Chunks are cut for as many blocks as fit, since
// blocks that have landed may be sent again.
absl::StatusOr<std::vector<Chunk>> ChunksOf(const SourceServiceOptions& options,
                                            const HeldPrompt& prompt,
                                            const v1::ReadRequest& request, uint64_t most) {
  if (request.ranges_size() > kMaxRanges) {
    return InvalidField(
        "ranges", absl::StrCat("at most ", kMaxRanges, " entries, found ", request.ranges_size()));
  }
  std::vector<MissingRange> ranges;
  for (const v1::BlockRange& range : request.ranges()) {
    const std::string field = absl::StrCat("ranges[", ranges.size(), "]");
    if (range.layer() >= static_cast<uint32_t>(options.layout.layers)) {
      return InvalidField(field + ".layer", absl::StrCat("there are ", options.layout.layers,
                                                         " layers, found ", range.layer()));
    }
    const int kind = options.layout.FindKind(range.kind());
    if (kind < 0) {
      return InvalidField(field + ".kind",
                          absl::StrCat("no such cache kind: '", range.kind().substr(0, 64), "'"));
    }
    const auto heads = static_cast<uint32_t>(options.layout.kinds[static_cast<size_t>(kind)].heads);
    if (range.head_begin() >= range.head_end() || range.head_end() > heads) {
      return InvalidField(field + ".head_end",
                          absl::StrCat("[", range.head_begin(), ", ", range.head_end(),
                                       ") is no part of the kind's ", heads, " heads"));
    }
    if (range.token_begin() >= range.token_end() || range.token_end() > prompt.context_length) {
      return InvalidField(
          field + ".token_end",
          absl::StrCat("[", range.token_begin(), ", ", range.token_end(),
                       ") is no part of the prompt's ", prompt.context_length, " tokens"));
    }
    ranges.push_back(FromProto(range));
  }
  std::vector<Chunk> chunks;
  for (const HeldLayer& layer : prompt.layers) {
    const CacheKind& kind = options.layout.kinds[layer.kind];
    const auto [begin, end] = Wanted(layer, kind, ranges);
    if (begin >= end) continue;
    const auto plans = PlanChunksFrom(kind, 0, end, begin, most);
    if (!plans.ok()) {
      return InvalidField("max_chunk_bytes",
                          absl::StrCat("one block of cache kind ", kind.name, " takes ",
                                       kind.block_bytes(), " bytes, more than ", most));
    }
    for (const ChunkPlan& plan : *plans) {
      if (ranges.empty() || Overlaps(static_cast<uint32_t>(layer.layer), kind.name, plan, ranges)) {
        chunks.push_back({&layer, plan});
      }
    }
  }
  return chunks;
}

// Returns the header without its transfer_id.
v1::ChunkHeader HeaderOf(const CacheLayout& layout, const Chunk& chunk) {
  v1::ChunkHeader header =
      HeaderOf(chunk.layer->layer, layout.kinds[chunk.layer->kind].name, chunk.plan);
  uint32_t crc =
      chunk.layer->Crc32cOf(layout.kinds[chunk.layer->kind], chunk.plan.token_begin,
                            chunk.plan.token_end, chunk.plan.head_begin, chunk.plan.head_end);
  if (SLUICE_FAILPOINT(kSourceChecksum)) ++crc;
  header.set_crc32c(crc);
  return header;
}

// One Read. One chunk is under way at a time; the next is made when the transport took it.
class ReadReactor : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  ReadReactor(const SourceServiceOptions& options, grpc::CallbackServerContext* context,
              const grpc::ByteBuffer* request)
      : options_(options), context_(context) {
    const absl::Status status = Guarded("Read", [&] { return Begin(*request); });
    if (status.ok()) {
      Next();
    } else {
      Finish(ToGrpcStatus(status));
    }
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the reader is gone"));
    Next();
  }
  void OnDone() override {
    NoteCall(*context_, [&](CallFields& call) { call.bytes = sent_bytes_; });
    delete this;
  }

 private:
  absl::Status Begin(const grpc::ByteBuffer& message) {
    grpc::ByteBuffer copy = message;  // copies references only
    grpc::ProtoBufferReader reader(&copy);
    v1::ReadRequest request;
    if (!reader.status().ok() || !request.ParseFromZeroCopyStream(&reader)) {
      return absl::InvalidArgumentError("the message is no ReadRequest");
    }
    SLUICE_ASSIGN_OR_RETURN(tenant_, TenantOf(options_, *context_, request));
    source_id_ = request.source_id();
    prompt_ = options_.held->Find(source_id_, tenant_);
    if (prompt_ == nullptr) return NoSuchSource(source_id_);
    const uint64_t most = request.max_chunk_bytes() == 0
                              ? options_.max_chunk_bytes
                              : std::min(request.max_chunk_bytes(), options_.max_chunk_bytes);
    SLUICE_ASSIGN_OR_RETURN(chunks_, ChunksOf(options_, *prompt_, request, most));
    return absl::OkStatus();
  }

  void Next() {
    if (next_ == chunks_.size()) return Finish(grpc::Status::OK);
    if (options_.held->Find(source_id_, tenant_) == nullptr) {  // Find renews the lease, too
      return Finish(ToGrpcStatus(NoSuchSource(source_id_)));
    }
    if (SLUICE_FAILPOINT(kSourceReset))
      return context_->TryCancel(), Finish(grpc::Status::CANCELLED);
    sent_bytes_ += chunks_[next_].plan.bytes;
    message_ = MessageOf(chunks_[next_++]);
    StartWrite(&message_);
  }

  grpc::ByteBuffer MessageOf(const Chunk& chunk) {
    using google::protobuf::internal::WireFormatLite;
    const uint8_t* const payload = chunk.layer->bytes + chunk.plan.offset;
    v1::ChunkHeader header = HeaderOf(options_.layout, chunk);
    header.set_transfer_id(source_id_);
    std::string front;
    {
      google::protobuf::io::StringOutputStream stream(&front);
      google::protobuf::io::CodedOutputStream out(&stream);
      const auto tag = [&](int field) {
        out.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
      };
      tag(v1::ReadResponse::kHeaderFieldNumber);
      out.WriteVarint32(static_cast<uint32_t>(header.ByteSizeLong()));
      header.SerializeToCodedStream(&out);
      tag(v1::ReadResponse::kPayloadFieldNumber);
      out.WriteVarint32(static_cast<uint32_t>(chunk.plan.bytes));
    }
    // The slice owns a share of the prompt for as long as the transport has the slice.
    auto* const owner = new std::shared_ptr<const HeldPrompt>(prompt_);
    const grpc::Slice slices[] = {
        grpc::Slice(front),
        grpc::Slice(
            const_cast<uint8_t*>(payload), chunk.plan.bytes,
            [](void* share) { delete static_cast<std::shared_ptr<const HeldPrompt>*>(share); },
            owner)};
    return grpc::ByteBuffer(slices, 2);
  }

  const SourceServiceOptions& options_;
  grpc::CallbackServerContext* const context_;
  std::string tenant_, source_id_;
  std::shared_ptr<const HeldPrompt> prompt_;
  std::vector<Chunk> chunks_;
  size_t next_ = 0;
  uint64_t sent_bytes_ = 0;
  grpc::ByteBuffer message_;  // the message under way
};

// Answers a ReadByLink, and posts what is to be sent.
absl::Status ReadByLink(const SourceServiceOptions& options,
                        const grpc::CallbackServerContext& context,
                        const v1::ReadByLinkRequest& request, v1::ReadByLinkResponse* response) {
  const std::string source_id = request.read().source_id();
  SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(options, context, request.read()));
  const std::shared_ptr<const HeldPrompt> prompt = options.held->Find(source_id, tenant);
  if (prompt == nullptr) return NoSuchSource(source_id);
  if (options.links == nullptr) {
    response->set_refused("kv_transport is grpc at the source: set nccl on both nodes");
    return absl::OkStatus();
  }
  PeerLinkOptions link;
  link.id = request.link_id();
  link.message_bytes = request.message_bytes();
  link.depth = static_cast<int>(std::min<uint32_t>(request.depth(), kMaxLinkDepth + 1));
  if (absl::Status status = options.links->CheckNew(link); !status.ok()) {
    if (absl::IsInvalidArgument(status)) return status;
    response->set_refused(std::string(status.message()));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<Chunk>> chunks =
      ChunksOf(options, *prompt, request.read(), request.message_bytes());
  if (!chunks.ok()) return chunks.status();
  if (chunks->size() > kMaxLinkChunks) {
    response->set_refused(absl::StrCat("more than ", kMaxLinkChunks, " chunks"));
    return absl::OkStatus();
  }
  for (const Chunk& chunk : *chunks) {
    v1::LinkChunk* const coming = response->add_chunks();
    *coming->mutable_header() = HeaderOf(options.layout, chunk);
    coming->set_bytes(chunk.plan.bytes);
  }
  absl::Status status = request.new_link() ? options.links->Make(link) : absl::OkStatus();
  if (status.ok()) {
    const auto send = [held = options.held, source_id, tenant, prompt,
                       chunks = *std::move(chunks)](PeerLink& to) -> absl::Status {
      for (const Chunk& chunk : chunks) {
        if (held->Find(source_id, tenant) == nullptr) {  // Find renews the lease, too
          to.Abort("the prompt is not held any more");
          return NoSuchSource(source_id);
        }
        const PeerLink::Piece piece = {chunk.layer->bytes + chunk.plan.offset, chunk.plan.bytes};
        SLUICE_RETURN_IF_ERROR(to.Send({&piece, 1}));
      }
      return to.Flush();
    };
    status = options.links->Post(link.id, send);
  }
  if (status.ok()) return status;
  response->clear_chunks();
  if (absl::IsNotFound(status)) {
    response->set_unknown_link(true);
  } else {
    response->set_refused(std::string(status.message()));
  }
  return absl::OkStatus();
}

// One AwaitPrompt. It ends when the room is filled or given up, when the time is up, or with its
// caller.
class AwaitPromptReactor : public grpc::ServerUnaryReactor {
 public:
  AwaitPromptReactor(const SourceServiceOptions& options, grpc::CallbackServerContext* context,
                     const v1::AwaitPromptRequest& request, v1::AwaitPromptResponse* response)
      : rooms_(options.rooms), response_(response) {
    const absl::Status status =
        Guarded("AwaitPrompt", [&] { return Begin(options, *context, request); });
    if (!status.ok()) Finish(ToGrpcStatus(status));
    if (wait_ == 0) return;
    // The alarm may run after this reactor is gone.
    alarm_.Set(absl::ToChronoTime(absl::Now() + options.longest_wait),
               [rooms = rooms_, wait = wait_](bool) { rooms->StopWaiting(wait); });
  }
  void OnCancel() override {
    if (wait_ != 0) rooms_->StopWaiting(wait_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Begin(const SourceServiceOptions& options,
                     const grpc::CallbackServerContext& context,
                     const v1::AwaitPromptRequest& request) {
    SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(options, context, request));
    if (rooms_ == nullptr) {
      return absl::FailedPreconditionError(
          "no prompt is promised here: start sluice-prefill with --gateway sglang");
    }
    wait_ = rooms_->AwaitPrompt({tenant, request.room()}, request.prompt_digest(), request.reader(),
                                [this](const absl::StatusOr<Rooms::Awaited>& met) {
                                  if (met.ok()) {
                                    response_->set_source_id(met->source_id);
                                    response_->set_expected(met->expected);
                                  }
                                  Finish(ToGrpcStatus(met.status()));
                                });
    return absl::OkStatus();
  }

  const std::shared_ptr<Rooms> rooms_;
  v1::AwaitPromptResponse* const response_;
  uint64_t wait_ = 0;  // 0: the wait has ended already
  grpc::Alarm alarm_;
};

using SourceBase = v1::KvSource::WithRawCallbackMethod_Read<
    v1::KvSource::WithCallbackMethod_AwaitPrompt<v1::KvSource::WithCallbackMethod_Describe<
        v1::KvSource::WithCallbackMethod_ReadByLink<v1::KvSource::WithCallbackMethod_Renew<
            v1::KvSource::WithCallbackMethod_Release<v1::KvSource::Service>>>>>>;

class SourceService final : public SourceBase {
 public:
  explicit SourceService(SourceServiceOptions options) : options_(std::move(options)) {}

  grpc::ServerUnaryReactor* AwaitPrompt(grpc::CallbackServerContext* context,
                                        const v1::AwaitPromptRequest* request,
                                        v1::AwaitPromptResponse* response) override {
    return new AwaitPromptReactor(options_, context, *request, response);  // deletes itself
  }

  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* context,
                                     const v1::DescribeRequest* request,
                                     v1::DescribeResponse* response) override {
    return Reply(context, "Describe", [&]() -> absl::Status {
      SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(options_, *context, *request));
      const auto prompt = options_.held->Find(request->source_id(), tenant);
      if (prompt == nullptr) return NoSuchSource(request->source_id());
      response->set_model_fingerprint(options_.model_fingerprint);
      for (const CacheKind& kind : options_.layout.kinds) {
        *response->add_cache_kinds() = ToProto(kind);
      }
      response->set_context_length(prompt->context_length);
      response->set_prompt_digest(prompt->prompt_digest);
      if (!prompt->hints.empty()) {
        *response->mutable_hints() = ToProto(prompt->hints, request->want_queries());
      }
      response->set_bytes(prompt->bytes);
      *response->mutable_lease_left() = ToProto(options_.held->max_lease());
      return absl::OkStatus();
    });
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Read(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request) override {
    return new ReadReactor(options_, context, request);  // deletes itself
  }

  grpc::ServerUnaryReactor* ReadByLink(grpc::CallbackServerContext* context,
                                       const v1::ReadByLinkRequest* request,
                                       v1::ReadByLinkResponse* response) override {
    return Reply(context, "ReadByLink",
                 [&] { return sluice::ReadByLink(options_, *context, *request, response); });
  }

  grpc::ServerUnaryReactor* Renew(grpc::CallbackServerContext* context,
                                  const v1::RenewRequest* request,
                                  v1::RenewResponse* response) override {
    return Reply(context, "Renew", [&]() -> absl::Status {
      SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(options_, *context, *request));
      absl::Duration lease = options_.held->max_lease();
      if (request->has_lease()) {
        SLUICE_ASSIGN_OR_RETURN(lease, PositiveDuration("lease", request->lease()));
      }
      const auto granted = options_.held->Renew(request->source_id(), tenant, lease);
      if (!granted.has_value()) return NoSuchSource(request->source_id());
      *response->mutable_lease() = ToProto(*granted);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override {
    return Reply(context, "Release", [&]() -> absl::Status {
      SLUICE_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(options_, *context, *request));
      response->set_found(options_.held->Release(request->source_id(), tenant));
      return absl::OkStatus();
    });
  }

 private:
  template <typename Work>
  static grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const char* call,
                                         Work&& work) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(Guarded(call, std::forward<Work>(work))));
    return reactor;
  }

  const SourceServiceOptions options_;
};

}  // namespace

GrpcService NewSourceService(SourceServiceOptions options) {
  return {v1::KvSource::service_full_name(), std::make_shared<SourceService>(std::move(options))};
}

}  // namespace sluice
