#include "src/service/ingest_service.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/service/proto_conversion.h"
#include "src/service/status_mapping.h"
#include "src/service/write_parser.h"

namespace sluice {
namespace {

constexpr size_t kMaxRangesOfGet = 1024;  // GetTransferResponse.missing

// What metrics need to remember of transfers: when each was reserved, and whether its last stream
// broke. Remembers the newest kMax: transfers that end without a Commit are forgotten by being old.
// Thread-safe.
class TransferNotes {
 public:
  void Reserved(const std::string& transfer_id) {
    absl::MutexLock lock(&mutex_);
    notes_[transfer_id] = Note{absl::Now(), /*broken=*/false};
    order_.push_back(transfer_id);
    if (order_.size() > kMax) {
      notes_.erase(order_.front());
      order_.pop_front();
    }
  }
  // Time since Reserve; once for each transfer.
  std::optional<absl::Duration> Committed(const std::string& transfer_id) {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    if (found == notes_.end()) return std::nullopt;
    const absl::Duration elapsed = absl::Now() - found->second.reserved;
    notes_.erase(found);
    return elapsed;
  }
  // A stream that wrote to it ended with an error.
  void Broke(const std::string& transfer_id) {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    if (found != notes_.end()) found->second.broken = true;
  }
  // A stream writes its first chunk to it: whether it goes on for one that broke.
  bool Resumes(const std::string& transfer_id) {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    return found != notes_.end() && std::exchange(found->second.broken, false);
  }

 private:
  struct Note {
    absl::Time reserved;
    bool broken;
  };
  static constexpr size_t kMax = 4096;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Note> notes_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> order_ ABSL_GUARDED_BY(mutex_);
};

// Lands one chunk in the transfer table.
class LandingSink : public ChunkSink {
 public:
  explicit LandingSink(TransferTable* transfers) : transfers_(transfers) {}

  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override {
    SLUICE_ASSIGN_OR_RETURN(landing_, transfers_->BeginChunk(header, payload_bytes));
    transfer_id_ = header.transfer_id;
    bytes_ = payload_bytes;
    return absl::OkStatus();
  }
  void Append(absl::Span<const uint8_t> bytes) override { landing_->Append(bytes); }

  absl::StatusOr<uint64_t> Finish() { return landing_->Finish(); }
  const std::string& transfer_id() const { return transfer_id_; }
  uint64_t bytes() const { return bytes_; }

 private:
  TransferTable* const transfers_;
  std::unique_ptr<ChunkLanding> landing_;
  std::string transfer_id_;
  uint64_t bytes_ = 0;
};

// One Write stream. Reads one message at a time, so the transport's flow control holds the sender
// to the speed at which chunks land.
class WriteReactor : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  WriteReactor(const IngestServiceOptions& options, TransferNotes* notes,
               grpc::CallbackServerContext* context, grpc::ByteBuffer* response)
      : options_(options), notes_(notes), context_(context), response_(response) {
    StartRead(&message_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {  // the client has closed its side, or the call is over
      FinishWith(context_->IsCancelled() ? absl::CancelledError("the stream was cancelled")
                                         : absl::OkStatus());
      return;
    }
    const absl::Status status = Land();
    message_.Clear();
    if (!status.ok()) {
      FinishWith(status);
      return;
    }
    if (SLUICE_FAILPOINT(kIngestReset)) context_->TryCancel();
    StartRead(&message_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Land() {
    grpc::ProtoBufferReader reader(&message_);
    if (!reader.status().ok()) return InvalidField("message", "is not readable");
    LandingSink sink(options_.transfers);
    SLUICE_RETURN_IF_ERROR(ParseWriteRequest(&reader, message_.Length(), sink));
    if (sink.transfer_id() != transfer_id_) {
      transfer_id_ = sink.transfer_id();
      if (notes_->Resumes(transfer_id_) && options_.metrics != nullptr) {
        options_.metrics->resumes.Add();
      }
    }
    const absl::StatusOr<uint64_t> blocks = sink.Finish();
    if (options_.metrics != nullptr) Count(blocks, sink.bytes());
    SLUICE_RETURN_IF_ERROR(blocks.status());
    blocks_landed_ += *blocks;
    bytes_landed_ += sink.bytes();
    return absl::OkStatus();
  }

  void Count(const absl::StatusOr<uint64_t>& blocks, uint64_t bytes) {
    if (blocks.ok()) {
      options_.metrics->ingest_bytes.Add(static_cast<double>(bytes));
      options_.metrics->ingest_blocks.Add(static_cast<double>(*blocks));
    } else if (absl::IsDataLoss(blocks.status())) {
      options_.metrics->checksum_failures.Add();
    }
  }

  void FinishWith(const absl::Status& status) {
    if (SLUICE_FAILPOINT(kIngestWriteAnswer)) context_->TryCancel();
    if (!status.ok()) {
      notes_->Broke(transfer_id_);
      Finish(ToGrpcStatus(status));
      return;
    }
    v1::WriteResponse response;
    response.set_blocks_landed(blocks_landed_);
    response.set_bytes_landed(bytes_landed_);
    // Of the last transfer that this stream wrote to; usually its only one.
    if (!transfer_id_.empty()) {
      response.set_blocks_missing(options_.transfers->BlocksMissing(transfer_id_));
    }
    bool own_buffer = false;
    Finish(grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::WriteResponse>(response, response_,
                                                                              &own_buffer));
  }

  const IngestServiceOptions& options_;
  TransferNotes* const notes_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  grpc::ByteBuffer message_;
  std::string transfer_id_;  // of the last chunk that had a place
  uint64_t blocks_landed_ = 0;
  uint64_t bytes_landed_ = 0;
};

using IngestBase =
    v1::KvIngest::WithRawCallbackMethod_Write<v1::KvIngest::WithCallbackMethod_Reserve<
        v1::KvIngest::WithCallbackMethod_Commit<v1::KvIngest::WithCallbackMethod_Abort<
            v1::KvIngest::WithCallbackMethod_GetTransfer<v1::KvIngest::Service>>>>>;

class IngestService final : public IngestBase {
 public:
  explicit IngestService(const IngestServiceOptions& options) : options_(options) {}

  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context,
                                    const v1::ReserveRequest* request,
                                    v1::ReserveResponse* response) override {
    const absl::Status status = DoReserve(*request, *response);
    if (options_.metrics != nullptr) {
      const Metrics& metrics = *options_.metrics;
      (status.ok() ? metrics.reserves_accepted : metrics.reserves_refused(ReasonLabel(status)))
          .Add();
    }
    return Reply(context, status);
  }

  grpc::ServerReadReactor<grpc::ByteBuffer>* Write(grpc::CallbackServerContext* context,
                                                   grpc::ByteBuffer* response) override {
    return new WriteReactor(options_, &notes_, context, response);  // deletes itself
  }

  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override {
    TransferInfo info;
    const absl::Status status = DoCommit(*request, *response, info);
    if (SLUICE_FAILPOINT(kIngestCommitAnswer)) context->TryCancel();
    const v1::MissingBlocks missing = ToMissingBlocks(info);
    return Finish(context, ToGrpcStatus(status, info.missing.empty() ? nullptr : &missing));
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* /*response*/) override {
    absl::Status status = CheckName("reason", request->reason(), kMaxReasonBytes);
    if (status.ok()) status = options_.transfers->Abort(request->transfer_id(), request->reason());
    return Reply(context, status);
  }

  grpc::ServerUnaryReactor* GetTransfer(grpc::CallbackServerContext* context,
                                        const v1::GetTransferRequest* request,
                                        v1::GetTransferResponse* response) override {
    return Reply(context, DoGet(*request, *response));
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

  absl::Status DoReserve(const v1::ReserveRequest& request, v1::ReserveResponse& response) {
    SLUICE_RETURN_IF_ERROR(options_.readiness->CheckNotDraining());
    SLUICE_ASSIGN_OR_RETURN(const Manifest manifest, FromProto(request));
    SLUICE_ASSIGN_OR_RETURN(const TransferTable::Reserved reserved,
                            options_.transfers->Reserve(manifest));
    notes_.Reserved(reserved.transfer_id);
    response.set_transfer_id(reserved.transfer_id);
    *response.mutable_lease() = ToProto(reserved.lease);
    response.set_max_chunk_bytes(reserved.max_chunk_bytes);
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
    SLUICE_ASSIGN_OR_RETURN(
        const uint32_t context_length,
        options_.transfers->Commit(request.transfer_id(), std::move(first_tokens), &missing));
    const std::optional<absl::Duration> elapsed = notes_.Committed(request.transfer_id());
    if (elapsed.has_value() && options_.metrics != nullptr) {
      options_.metrics->ingest_seconds.Observe(*elapsed);
    }
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
  TransferNotes notes_;
};

}  // namespace

GrpcService NewIngestService(const IngestServiceOptions& options) {
  return {v1::KvIngest::service_full_name(), std::make_shared<IngestService>(options)};
}

}  // namespace sluice
