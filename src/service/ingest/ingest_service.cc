#include "src/service/ingest/ingest_service.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/service/access/caller.h"
#include "src/service/ingest/landing_sink.h"
#include "src/service/ingest/link_write.h"
#include "src/service/ingest/transfer_watch.h"
#include "src/service/ingest/write_parser.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/read_ahead.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

constexpr size_t kMaxRangesOfGet = 1024;  // GetTransferResponse.missing

// Lands a caller's chunks in its own transfers only.
class OwnLandingSink : public LandingSink {
 public:
  // `tenant` is the tenant to whom the transfers must belong, and empty for any. `known` is a
  // transfer that was checked already.
  OwnLandingSink(TransferTable* transfers, const std::string& tenant, const std::string& known)
      : LandingSink(transfers), transfers_(transfers), tenant_(tenant), known_(known) {}

  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override {
    if (!tenant_.empty() && header.transfer_id != known_) {
      SLUICE_RETURN_IF_ERROR(transfers_->CheckOwner(header.transfer_id, tenant_));
    }
    return LandingSink::Begin(header, payload_bytes);
  }

 private:
  TransferTable* const transfers_;
  const std::string& tenant_;
  const std::string& known_;
};

void NoteTransfer(const grpc::ServerContextBase& context, const std::string& id,
                  uint64_t bytes = 0) {
  NoteCall(context, [&](CallFields& call) {
    call.transfer_id = id.substr(0, kMaxNameBytes);
    call.bytes = bytes;
  });
}

// One Write stream. Its chunks land one after the other.
class WriteReactor : private ReadAhead, public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  WriteReactor(const IngestServiceOptions& options, TransferWatch* watch,
               grpc::CallbackServerContext* context, grpc::ByteBuffer* response)
      : options_(options),
        watch_(watch),
        context_(context),
        response_(response),
        tenant_(CallerOf(options.access, *context).tenant) {
    ReadOn();
  }

  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnDone() override { delete this; }

 private:
  void Read(grpc::ByteBuffer* message) override { StartRead(message); }
  absl::Status Take(grpc::ByteBuffer* message) override {
    return Guarded("Write", [&] { return Land(message); });
  }
  void Ended(const absl::Status& status) override {
    const bool cancelled = status.ok() && context_->IsCancelled();
    FinishWith(cancelled ? absl::CancelledError("the stream was cancelled") : status);
  }

  absl::Status Land(grpc::ByteBuffer* message) {
    grpc::ProtoBufferReader reader(message);
    if (!reader.status().ok()) return InvalidField("message", "is not readable");
    OwnLandingSink sink(options_.transfers, tenant_, owned_);
    const absl::Status begun = ParseWriteRequest(&reader, message->Length(), sink);
    const bool first = sink.transfer_id() != transfer_id_;
    if (first) transfer_id_ = sink.transfer_id().substr(0, kMaxNameBytes);
    SLUICE_RETURN_IF_ERROR(begun);
    owned_ = transfer_id_;
    if (first) watch_->StreamBegan(transfer_id_);
    const absl::StatusOr<uint64_t> blocks = sink.Finish();
    watch_->ChunkEnded(blocks, sink.bytes());
    SLUICE_RETURN_IF_ERROR(blocks.status());
    blocks_landed_ += *blocks;
    bytes_landed_ += sink.bytes();
    // The failpoint is passed once for every chunk that has landed. The chunks that follow it are
    // lost, however far ahead was read.
    if (SLUICE_FAILPOINT(kIngestReset)) {
      context_->TryCancel();
      return absl::CancelledError("failpoint ingest.reset");
    }
    return absl::OkStatus();
  }

  void FinishWith(const absl::Status& status) {
    if (SLUICE_FAILPOINT(kIngestWriteAnswer)) context_->TryCancel();
    NoteTransfer(*context_, transfer_id_, bytes_landed_);
    if (!status.ok()) {
      watch_->StreamBroke(transfer_id_, status);
      Finish(ToGrpcStatus(status));
      return;
    }
    v1::WriteResponse response;
    response.set_blocks_landed(blocks_landed_);
    response.set_bytes_landed(bytes_landed_);
    // Reports the last transfer that this stream wrote to, which is usually its only one.
    if (!transfer_id_.empty()) {
      response.set_blocks_missing(options_.transfers->BlocksMissing(transfer_id_));
    }
    bool own_buffer = false;
    Finish(grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::WriteResponse>(response, response_,
                                                                              &own_buffer));
  }

  const IngestServiceOptions& options_;
  TransferWatch* const watch_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  const std::string tenant_;  // the caller's tenant; empty if it may act for any
  // Used by the thread that lands.
  std::string transfer_id_;  // named by the last accepted chunk
  std::string owned_;        // the last transfer that was found to be the caller's
  uint64_t blocks_landed_ = 0;
  uint64_t bytes_landed_ = 0;
};

using IngestBase = v1::KvIngest::WithRawCallbackMethod_Write<
    v1::KvIngest::WithCallbackMethod_Reserve<v1::KvIngest::WithCallbackMethod_WriteByLink<
        v1::KvIngest::WithCallbackMethod_Commit<v1::KvIngest::WithCallbackMethod_Abort<
            v1::KvIngest::WithCallbackMethod_GetTransfer<v1::KvIngest::Service>>>>>>;

class IngestService final : public IngestBase {
 public:
  explicit IngestService(const IngestServiceOptions& options)
      : options_(options), watch_(*options.metrics, RealClock(), options.log_prompts) {}

  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context,
                                    const v1::ReserveRequest* request,
                                    v1::ReserveResponse* response) override {
    const absl::Status status =
        Guarded("Reserve", [&] { return DoReserve(*context, *request, *response); });
    NoteTransfer(*context, response->transfer_id());
    if (!status.ok()) watch_.ReserveRefused(status);
    return Reply(context, status);
  }

  grpc::ServerReadReactor<grpc::ByteBuffer>* Write(grpc::CallbackServerContext* context,
                                                   grpc::ByteBuffer* response) override {
    return new WriteReactor(options_, &watch_, context, response);  // deletes itself
  }

  grpc::ServerBidiReactor<v1::WriteByLinkRequest, v1::WriteByLinkResponse>* WriteByLink(
      grpc::CallbackServerContext* context) override {
    return NewLinkWrite(options_, &watch_, context);
  }

  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override {
    TransferInfo info;
    const absl::Status status = Guarded("Commit", [&]() -> absl::Status {
      SLUICE_RETURN_IF_ERROR(Own(*context, request->transfer_id()));
      return DoCommit(*request, *response, info);
    });
    if (SLUICE_FAILPOINT(kIngestCommitAnswer)) context->TryCancel();
    NoteTransfer(*context, request->transfer_id());
    const v1::MissingBlocks missing = ToMissingBlocks(info);
    return Finish(context, ToGrpcStatus(status, info.missing.empty() ? nullptr : &missing));
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* /*response*/) override {
    absl::Status status = CheckName("reason", request->reason(), kMaxReasonBytes);
    // A transfer that belongs to somebody else is answered as one that is not there: nothing is to
    // be done.
    if (status.ok() && !Own(*context, request->transfer_id()).ok()) return Reply(context, status);
    if (status.ok()) status = options_.transfers->Abort(request->transfer_id(), request->reason());
    if (status.ok()) watch_.Aborted(request->transfer_id());
    NoteTransfer(*context, request->transfer_id());
    return Reply(context, status);
  }

  grpc::ServerUnaryReactor* GetTransfer(grpc::CallbackServerContext* context,
                                        const v1::GetTransferRequest* request,
                                        v1::GetTransferResponse* response) override {
    return Reply(context, Guarded("GetTransfer", [&]() -> absl::Status {
                   SLUICE_RETURN_IF_ERROR(Own(*context, request->transfer_id()));
                   return DoGet(*request, *response);
                 }));
  }

 private:
  static constexpr size_t kMaxReasonBytes = 1024;

  static grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context,
                                          const grpc::Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(status);
    return reactor;
  }
  static grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context,
                                         const absl::Status& status) {
    return Finish(context, ToGrpcStatus(status));
  }

  absl::Status Own(const grpc::CallbackServerContext& context,
                   const std::string& transfer_id) const {
    const std::string tenant = CallerOf(options_.access, context).tenant;
    return tenant.empty() ? absl::OkStatus() : options_.transfers->CheckOwner(transfer_id, tenant);
  }

  absl::Status DoReserve(const grpc::CallbackServerContext& context,
                         const v1::ReserveRequest& request, v1::ReserveResponse& response) {
    SLUICE_RETURN_IF_ERROR(options_.readiness->CheckTakesWork());
    SLUICE_ASSIGN_OR_RETURN(Manifest manifest, FromProto(request));
    SLUICE_ASSIGN_OR_RETURN(manifest.tenant, TenantFor(CallerOf(options_.access, context),
                                                       manifest.tenant, "manifest.tenant"));
    SLUICE_ASSIGN_OR_RETURN(const TransferTable::Reserved reserved,
                            options_.transfers->Reserve(manifest));
    watch_.Reserved(manifest, reserved.transfer_id);
    response.set_transfer_id(reserved.transfer_id);
    *response.mutable_lease() = ToProto(reserved.lease);
    response.set_max_chunk_bytes(reserved.max_chunk_bytes);
    response.set_hint_tokens(static_cast<uint64_t>(reserved.hint_tokens));
    response.set_hint_queries(static_cast<uint64_t>(reserved.hint_queries));
    response.set_cached_tokens(static_cast<uint64_t>(reserved.cached_tokens));
    return absl::OkStatus();
  }

  absl::Status DoCommit(const v1::CommitRequest& request, v1::CommitResponse& response,
                        TransferInfo& missing) {
    if (static_cast<size_t>(request.first_tokens_size()) > kMaxFirstTokens) {
      return InvalidField("first_tokens",
                          absl::StrCat("at most ", kMaxFirstTokens, " entries, found ",
                                       request.first_tokens_size()));
    }
    std::vector<OutputToken> first_tokens;
    for (int i = 0; i < request.first_tokens_size(); ++i) {
      SLUICE_ASSIGN_OR_RETURN(OutputToken token,
                              FromProto(absl::StrCat("first_tokens[", i, "]"),
                                        request.first_tokens(i), options_.vocab_size));
      first_tokens.push_back(std::move(token));
    }
    SLUICE_ASSIGN_OR_RETURN(SelectionHints hints, FromProto(request.hints()));
    SLUICE_ASSIGN_OR_RETURN(
        const uint32_t context_length,
        options_.transfers->Commit(request.transfer_id(), std::move(first_tokens), &missing,
                                   std::move(hints)));
    watch_.Committed(request.transfer_id(), context_length);
    response.set_context_length(context_length);
    return absl::OkStatus();
  }

  absl::Status DoGet(const v1::GetTransferRequest& request, v1::GetTransferResponse& response) {
    SLUICE_ASSIGN_OR_RETURN(const TransferInfo info,
                            options_.transfers->Get(request.transfer_id(), kMaxRangesOfGet));
    switch (info.state) {
      case TransferInfo::State::kReceiving:
        response.set_state(v1::GetTransferResponse::STATE_RECEIVING);
        break;
      case TransferInfo::State::kCommitted:
        response.set_state(v1::GetTransferResponse::STATE_COMMITTED);
        break;
      case TransferInfo::State::kPoisoned:
        response.set_state(v1::GetTransferResponse::STATE_POISONED);
        break;
    }
    response.set_blocks_landed(info.blocks_landed);
    response.set_blocks_total(info.blocks_total);
    *response.mutable_missing() = ToMissingBlocks(info);
    *response.mutable_lease_left() = ToProto(info.lease_left);
    return absl::OkStatus();
  }

  const IngestServiceOptions options_;
  TransferWatch watch_;
};

}  // namespace

GrpcService NewIngestService(const IngestServiceOptions& options) {
  return {v1::KvIngest::service_full_name(), std::make_shared<IngestService>(options)};
}

}  // namespace sluice
