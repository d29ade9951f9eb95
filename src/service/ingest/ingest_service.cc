#include "src/service/ingest/ingest_service.h"

#include <grpcpp/grpcpp.h>

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
#include "src/service/ingest/claimed_writes.h"
#include "src/service/ingest/link_write.h"
#include "src/service/ingest/transfer_watch.h"
#include "src/service/ingest/transfer_writes.h"
#include "src/service/ingest/write_stream.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

constexpr size_t kMaxRangesOfGet = 1024;  // GetTransferResponse.missing

using IngestBase = v1::KvIngest::WithRawCallbackMethod_Write<
    v1::KvIngest::WithCallbackMethod_Reserve<v1::KvIngest::WithCallbackMethod_WriteByLink<
        v1::KvIngest::WithCallbackMethod_Commit<v1::KvIngest::WithCallbackMethod_Abort<
            v1::KvIngest::WithCallbackMethod_GetTransfer<v1::KvIngest::Service>>>>>>;

class IngestService final : public IngestBase {
 public:
  explicit IngestService(const IngestServiceOptions& options)
      : options_(options), watch_(*options.metrics, RealClock(), options.log_prompts) {
    if (options_.claims == nullptr) return;
    options_.claims->ServeWith(
        [this](int rank) { return NewClaimStream(rank, options_.transfers, &watch_); });
  }
  ~IngestService() override {
    if (options_.claims != nullptr) options_.claims->ServeWith(nullptr);
  }

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
    return NewWriteStream(
        context, response,
        std::make_unique<TransferWrites>(options_.transfers, &watch_,
                                         CallerOf(options_.access, *context).tenant));
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
    for (const RankHeads& heads : reserved.rank_heads) {
      const auto rank = static_cast<size_t>(heads.rank);
      if (rank >= options_.rank_addresses.size() || options_.rank_addresses[rank].empty()) continue;
      v1::RankPort* const port = response.add_rank_ports();
      port->set_address(options_.rank_addresses[rank]);
      port->set_head_begin(heads.begin);
      port->set_head_end(heads.end);
    }
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
