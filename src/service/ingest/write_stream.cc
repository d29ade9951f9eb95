#include "src/service/ingest/write_stream.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <utility>

#include "sluice/v1/ingest.pb.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/read_ahead.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// Notes the transfer and the bytes of a chunk on its way to the target.
class NotedChunk : public ChunkSink {
 public:
  explicit NotedChunk(WriteTarget* target) : target_(target) {}
  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override {
    transfer_id_ = header.transfer_id.substr(0, kMaxNameBytes);
    bytes_ = payload_bytes;
    return target_->Begin(header, payload_bytes);
  }
  void Append(absl::Span<const uint8_t> bytes) override { target_->Append(bytes); }
  const std::string& transfer_id() const { return transfer_id_; }
  uint64_t bytes() const { return bytes_; }

 private:
  WriteTarget* const target_;
  std::string transfer_id_;
  uint64_t bytes_ = 0;
};

class WriteReactor : private ReadAhead, public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  WriteReactor(grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
               std::unique_ptr<WriteTarget> target)
      : context_(context), response_(response), target_(std::move(target)) {
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
    NotedChunk chunk(target_.get());
    const absl::Status parsed = ParseWriteRequest(&reader, message->Length(), chunk);
    if (!chunk.transfer_id().empty()) transfer_id_ = chunk.transfer_id();
    SLUICE_RETURN_IF_ERROR(parsed);
    SLUICE_ASSIGN_OR_RETURN(const uint64_t blocks, target_->Finish());
    blocks_landed_ += blocks;
    bytes_landed_ += chunk.bytes();
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
      target_->Ended(status);
      Finish(ToGrpcStatus(status));
      return;
    }
    v1::WriteResponse response;
    response.set_blocks_landed(blocks_landed_);
    response.set_bytes_landed(bytes_landed_);
    // Reports the last transfer that this stream wrote to, which is usually its only one.
    if (!transfer_id_.empty()) response.set_blocks_missing(target_->BlocksMissing());
    target_->Ended(status);
    bool own_buffer = false;
    Finish(grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::WriteResponse>(response, response_,
                                                                              &own_buffer));
  }

  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const response_;
  // Used by the thread that lands.
  const std::unique_ptr<WriteTarget> target_;
  std::string transfer_id_;  // named by the last chunk
  uint64_t blocks_landed_ = 0;
  uint64_t bytes_landed_ = 0;
};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* NewWriteStream(grpc::CallbackServerContext* context,
                                                          grpc::ByteBuffer* response,
                                                          std::unique_ptr<WriteTarget> target) {
  return new WriteReactor(context, response, std::move(target));
}

void NoteTransfer(const grpc::ServerContextBase& context, const std::string& id, uint64_t bytes) {
  NoteCall(context, [&](CallFields& call) {
    call.transfer_id = id.substr(0, kMaxNameBytes);
    call.bytes = bytes;
  });
}

}  // namespace sluice
