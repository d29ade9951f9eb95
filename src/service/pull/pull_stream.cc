#include "src/service/pull/pull_stream.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/ingest/landing_sink.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {

// The response is read as bytes, so that a chunk goes from the transport's slices to its pages in
// one copy.
PullStream::PullStream(Options options)
    : options_(std::move(options)),
      stub_(options_.channel),
      heard_(absl::ToUnixMillis(absl::Now())) {
  bool own = false;
  (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::ReadRequest>(options_.request,
                                                                         &request_, &own);
  stub_.PrepareBidiStreamingCall(options_.context.get(), "/sluice.v1.KvSource/Read", {}, this);
  StartWriteLast(&request_, grpc::WriteOptions());
  ReadOn();
  StartCall();
}

absl::Status PullStream::Join() {
  done_.WaitForNotification();
  const absl::Status status = landed_.ok() ? status_ : landed_;
  if (!silent_.load() || status.ok()) return status;
  return WithReason(absl::DeadlineExceededError(absl::StrCat(
                        "it sent nothing for ", absl::FormatDuration(options_.idle_timeout))),
                    reasons::kSourceSilent);
}

void PullStream::EndIfIdle(absl::Time now, bool unwanted) {
  const bool silent = absl::FromUnixMillis(heard_.load()) + options_.idle_timeout < now;
  if (silent) silent_.store(true);
  if (silent || unwanted) options_.context->TryCancel();
}

void PullStream::OnReadDone(bool ok) {
  if (ok) heard_.store(absl::ToUnixMillis(absl::Now()));
  ReadDone(ok);
}

absl::Status PullStream::Take(grpc::ByteBuffer* message) {
  return Guarded("a pull", [&]() -> absl::Status {
    grpc::ProtoBufferReader reader(message);
    if (!reader.status().ok()) return absl::DataLossError("a chunk is not readable");
    LandingSink sink(options_.transfers, options_.transfer_id);
    const absl::Status begun = ParseWriteRequest(&reader, message->Length(), sink);
    if (absl::IsInvalidArgument(begun)) {  // this is the source's fault, and no caller's
      return WithReason(absl::FailedPreconditionError(
                            absl::StrCat("it sent a chunk that does not fit: ", begun.message())),
                        reasons::kSourceMismatch);
    }
    SLUICE_RETURN_IF_ERROR(begun);
    return sink.Finish().status();
  });
}

void PullStream::Ended(const absl::Status& status) {
  if (status.ok()) return;  // OnDone reports the error
  landed_ = status;
  options_.context->TryCancel();
}

void PullStream::OnDone(const grpc::Status& status) {
  status_ = FromGrpcStatus(status);
  done_.Notify();
}

}  // namespace sluice
