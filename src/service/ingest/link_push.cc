#include "src/service/ingest/link_push.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "src/device/peer_link.h"
#include "src/service/wire/chunking.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// The most bytes that the messages under way of a link may take.
constexpr uint64_t kMaxLinkBytes = uint64_t{256} << 20;

}  // namespace

// The stream of headers and answers. gRPC's threads read; nothing waits longer than it is told to.
class LinkPush::Stream
    : public grpc::ClientBidiReactor<v1::WriteByLinkRequest, v1::WriteByLinkResponse> {
 public:
  Stream(v1::KvIngest::Stub* stub, std::unique_ptr<grpc::ClientContext> context)
      : context_(std::move(context)) {
    stub->async()->WriteByLink(context_.get(), this);
    AddHold();
    StartRead(&answer_);
    StartCall();
  }
  ~Stream() override { End(absl::ZeroDuration()).IgnoreError(); }

  // UNAVAILABLE: the stream has ended, or takes nothing for `timeout`.
  absl::Status Write(const v1::WriteByLinkRequest& request, absl::Duration timeout) {
    const auto free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !writing_; };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(&free), timeout) || over_) {
      return absl::UnavailableError("the stream to the decode node is broken");
    }
    writing_ = true;
    request_ = request;
    StartWrite(&request_);
    return absl::OkStatus();
  }
  // Waits until `enough` is true of all answers so far, or the stream has ended. Returns false if
  // neither came about within `timeout`.
  template <typename Enough>
  bool Await(Enough&& enough, absl::Duration timeout) {
    const auto met = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return over_ || enough(said_); };
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&met), timeout);
  }
  v1::WriteByLinkResponse said() {
    absl::MutexLock lock(&mutex_);
    return said_;
  }
  // Returns the stream's status. Cancels it if it has not ended within `timeout`.
  absl::Status End(absl::Duration timeout) {
    const auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return over_; };
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return done_; };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(&over), timeout)) context_->TryCancel();
    if (!std::exchange(released_, true)) RemoveHold();
    mutex_.Await(absl::Condition(&done));
    return status_;
  }

 private:
  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      over_ = true;
      return;
    }
    said_.MergeFrom(answer_);
    StartRead(&answer_);
  }
  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    over_ = over_ || !ok;
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    status_ = FromGrpcStatus(status);
    over_ = done_ = true;
  }

  const std::unique_ptr<grpc::ClientContext> context_;
  v1::WriteByLinkRequest request_;  // under way
  v1::WriteByLinkResponse answer_;
  absl::Mutex mutex_;
  v1::WriteByLinkResponse said_ ABSL_GUARDED_BY(mutex_);  // by all answers
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;  // no answer will come any more
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

LinkPush::LinkPush(const Options& options, std::shared_ptr<LinkPeer> peer,
                   std::unique_ptr<Stream> stream)
    : links_(options.links), peer_(std::move(peer)), stream_(std::move(stream)) {}

LinkPush::~LinkPush() {
  if (peer_ != nullptr) Broken(absl::CancelledError("given up")).IgnoreError();
}

absl::StatusOr<std::unique_ptr<LinkPush>> LinkPush::Open(const Options& options) {
  LinkPeers& links = *options.links;
  const absl::Duration deadline = links.deadline();
  SLUICE_ASSIGN_OR_RETURN(std::shared_ptr<LinkPeer> peer, links.Enter(options.address));
  if (absl::Now() < peer->ask_at) return peer->refused;
  v1::WriteByLinkRequest request;
  request.mutable_open()->set_transfer_id(options.transfer_id);
  request.mutable_open()->set_transport(links.links().transport());
  for (int attempt = 0; attempt < 2; ++attempt) {
    const bool fresh = peer->link == nullptr;
    request.mutable_open()->set_link_id(fresh ? "" : peer->id);
    auto stream = std::make_unique<Stream>(options.stub, options.new_context());
    const auto fail = [&](const absl::Status& why) {
      stream.reset();
      peer->link.reset();
      return why;
    };
    SLUICE_RETURN_IF_ERROR(stream->Write(request, deadline));
    if (!stream->Await([](const auto& said) { return said.ByteSizeLong() > 0; }, deadline)) {
      return fail(absl::UnavailableError(
          absl::StrCat("the decode node did not answer for ", absl::FormatDuration(deadline))));
    }
    const v1::WriteByLinkResponse said = stream->said();
    if (!said.refused().empty()) {
      return links.Refuse(*peer, absl::FailedPreconditionError(said.refused()));
    }
    if (said.unknown_link()) {  // the node has begun anew, or needed the memory
      peer->link.reset();
      continue;
    }
    if (fresh && !said.link_id().empty()) {
      PeerLinkOptions link;
      link.id = said.link_id();
      link.message_bytes = said.message_bytes();
      link.depth = static_cast<int>(std::min<uint32_t>(said.depth(), kMaxLinkDepth + 1));
      absl::Status joined = CheckPeerLinkOptions(link);
      if (joined.ok() && link.message_bytes * static_cast<uint64_t>(link.depth) > kMaxLinkBytes) {
        joined = absl::ResourceExhaustedError(
            absl::StrCat("the decode node's link takes more than ", kMaxLinkBytes, " bytes"));
      }
      if (joined.ok()) joined = links.links().CheckId(link.id);
      if (joined.ok()) joined = links.Join(*peer, link);
      if (!joined.ok()) return links.Refuse(*peer, joined);
    }
    if (!stream->Await([](const auto& now) { return now.ready(); }, deadline)) {
      return fail(absl::UnavailableError(
          absl::StrCat("other pushes have the link for ", absl::FormatDuration(deadline))));
    }
    if (peer->link == nullptr || !stream->said().ready()) {
      absl::Status why = stream->End(absl::ZeroDuration());
      if (why.ok()) why = absl::UnavailableError("the decode node gave no link");
      return absl::IsUnimplemented(why) ? links.Refuse(*peer, why) : fail(why);
    }
    return std::unique_ptr<LinkPush>(new LinkPush(options, std::move(peer), std::move(stream)));
  }
  return links.Refuse(*peer, absl::UnavailableError("the decode node forgets its links at once"));
}

absl::Status LinkPush::Broken(const absl::Status& why) {
  Heard();
  stream_.reset();
  peer_->link.reset();
  peer_.reset();
  return absl::UnavailableError(why.message());
}

absl::Status LinkPush::Send(const std::vector<Chunk>& chunks,
                            absl::Span<const absl::Span<const uint8_t>> pieces) {
  SLUICE_CHECK(peer_ != nullptr, "a push that has ended sends no more");
  for (const Chunk& chunk : chunks) {
    if (Heard().failed()) return Finish();
    if (const absl::Status sent = Add(chunk, pieces); !sent.ok()) return Broken(sent);
  }
  return absl::OkStatus();
}

absl::Status LinkPush::Add(const Chunk& chunk, absl::Span<const absl::Span<const uint8_t>> pieces) {
  if (next_.bytes + chunk.bytes > message_bytes() || next_.chunks.chunks_size() == kMaxLinkChunks) {
    SLUICE_RETURN_IF_ERROR(SendMessage());
  }
  for (const absl::Span<const uint8_t> piece : PiecesOfRange(pieces, chunk.offset, chunk.bytes)) {
    next_.pieces.push_back({const_cast<uint8_t*>(piece.data()), piece.size()});
  }
  v1::LinkChunk& added = *next_.chunks.add_chunks();
  *added.mutable_header() = chunk.header;
  added.mutable_header()->clear_transfer_id();
  added.set_bytes(chunk.bytes);
  next_.bytes += chunk.bytes;
  return next_.bytes < message_bytes() ? absl::OkStatus() : SendMessage();
}

absl::Status LinkPush::SendMessage() {
  if (next_.bytes == 0) return absl::OkStatus();
  if (sent_ - checked_ == static_cast<uint64_t>(peer_->link->depth())) {
    SLUICE_RETURN_IF_ERROR(SendChecksum());
  }
  Message message = std::exchange(next_, {});
  v1::WriteByLinkRequest request;
  *request.mutable_message() = std::move(message.chunks);
  // The headers go first: NCCL sends nothing before the other end has asked for a message.
  SLUICE_RETURN_IF_ERROR(stream_->Write(request, links_->deadline()));
  SLUICE_RETURN_IF_ERROR(peer_->link->Send(message.pieces, /*checksum=*/true));
  coming_.push_back(message.bytes);
  ++sent_;
  return absl::OkStatus();
}

absl::Status LinkPush::SendChecksum() {
  SLUICE_ASSIGN_OR_RETURN(const uint32_t crc, peer_->link->Sent());
  v1::WriteByLinkRequest request;
  request.set_crc32c(crc);
  SLUICE_RETURN_IF_ERROR(stream_->Write(request, links_->deadline()));
  ++checked_;
  return absl::OkStatus();
}

v1::WriteByLinkResponse LinkPush::Heard() {
  v1::WriteByLinkResponse said = stream_->said();
  for (; landed_ < said.messages_landed() && !coming_.empty(); ++landed_) {
    bytes_landed_ += coming_.front();
    coming_.pop_front();
  }
  return said;
}

absl::Status LinkPush::Settle() {
  if (!Heard().failed()) SLUICE_RETURN_IF_ERROR(SendMessage());
  while (checked_ < sent_) SLUICE_RETURN_IF_ERROR(SendChecksum());
  const auto over = [this](const v1::WriteByLinkResponse& said) {
    return said.failed() || said.messages_landed() >= sent_;
  };
  if (!stream_->Await(over, links_->deadline())) {
    return absl::UnavailableError("the decode node leaves messages of a link unanswered");
  }
  if (over(Heard())) return absl::OkStatus();
  return stream_->End(absl::ZeroDuration());  // it broke off
}

absl::Status LinkPush::Finish() {
  if (peer_ == nullptr) return absl::OkStatus();
  if (const absl::Status settled = Settle(); !settled.ok()) return Broken(settled);
  const bool failed = Heard().failed();
  v1::WriteByLinkRequest request;
  request.set_end(true);
  absl::Status status = stream_->Write(request, links_->deadline());
  if (!status.ok()) return Broken(status);
  status = stream_->End(links_->deadline());
  // Every other error says that a chunk did not land, and leaves the link in order.
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) return Broken(status);
  stream_.reset();
  peer_.reset();
  if (failed && status.ok()) return absl::InternalError("the decode node did not say why");
  return status;
}

}  // namespace sluice
