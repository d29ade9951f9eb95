// The transport's threads bring headers and checksums into queues. The link's thread (LinkServer)
// takes them out, asks for the messages and lands them, once the calls that were there before are
// over.
#include "src/service/ingest/link_write.h"

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/service/access/caller.h"
#include "src/service/links/link_landing.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// Messages' headers, or checksums, that wait for the link, and the bytes of the headers. Beyond
// them nothing is read, so that the transport holds the sender.
constexpr size_t kMaxWaiting = 256;
constexpr size_t kMaxWaitingBytes = size_t{1} << 20;
constexpr size_t kMaxLinkIdBytes = 1024;

class LinkWrite : public grpc::ServerBidiReactor<v1::WriteByLinkRequest, v1::WriteByLinkResponse> {
 public:
  LinkWrite(const IngestServiceOptions& options, TransferWatch* watch,
            grpc::CallbackServerContext* context)
      : options_(options),
        watch_(watch),
        context_(context),
        tenant_(CallerOf(options.access, *context).tenant) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      // Without an `end` it has broken off, which OnCancel also says.
      bool opened;
      {
        absl::MutexLock lock(&mutex_);
        broken_ = broken_ || !closed_;
        opened = opened_;
      }
      if (!opened) End(InvalidField("open", "is missing"));
      return;
    }
    bool first;
    {
      absl::MutexLock lock(&mutex_);
      first = !std::exchange(opened_, true);
      if (!first) Keep();
    }
    if (first) {
      const absl::Status status = Guarded("WriteByLink", [this] { return Open(); });
      if (!status.ok()) End(status);
    }
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    ReadOn();
  }
  void OnWriteDone(bool /*ok*/) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!WriteNext() && end_.has_value()) Finish(ToGrpcStatus(*end_));
  }
  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
    if (link_ != nullptr) link_->Abort("its stream has ended");
  }
  void OnDone() override { delete this; }

 private:
  // Takes the first message, and posts what lands the others.
  absl::Status Open();
  // Answers that nothing will come over a link.
  absl::Status Refuse(const absl::Status& why) {
    Say([&](v1::WriteByLinkResponse& answer) { answer.set_refused(std::string(why.message())); });
    End(absl::OkStatus());
    return absl::OkStatus();
  }
  // Keeps a message behind the first.
  void Keep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    closed_ = closed_ || request_.end();
    if (request_.has_message()) {
      waiting_bytes_ += request_.message().ByteSizeLong();
      waiting_.push_back(std::move(*request_.mutable_message()));
    }
    if (request_.has_crc32c()) checksums_.push_back(request_.crc32c());
  }
  bool full() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return waiting_.size() >= kMaxWaiting || waiting_bytes_ >= kMaxWaitingBytes ||
           checksums_.size() >= kMaxWaiting;
  }
  // Reads the next message, if none is being read and there is room for it.
  void ReadOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (reading_ || end_.has_value() || full()) return;
    reading_ = true;
    StartRead(&request_);
  }
  // Lands what comes, on the link's thread. An error ends the link.
  absl::Status Land(PeerLink& link);
  absl::Status LandAll(PeerLink& link, absl::Status* failed);
  // Says what the link's thread does next: ask for this message, or land the oldest that has
  // arrived, or end, or, if none of these is set, await the oldest message that is moving.
  struct Turn {
    std::optional<v1::LinkMessage> message;
    std::optional<uint32_t> crc32c;
    bool over = false;
  };
  // Waits for the sender if no message is moving.
  absl::StatusOr<Turn> Next(const LinkLanding& landing);

  // Changes the next answer, and sends it as soon as no other is under way.
  template <typename Change>
  void Say(Change&& change) {
    absl::MutexLock lock(&mutex_);
    change(next_);
    has_next_ = true;
    WriteNext();
  }
  // Returns whether an answer is under way.
  bool WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!writing_ && has_next_) {
      writing_ = true;
      has_next_ = false;
      answer_ = std::exchange(next_, {});
      StartWrite(&answer_);
    }
    return writing_;
  }
  // Ends the call once the last answer is sent. This object may be gone when it returns.
  void End(const absl::Status& status) {
    NoteCall(*context_, [&](CallFields& call) {
      call.transfer_id = transfer_id_;
      call.bytes = bytes_landed_;
    });
    if (!status.ok() && !transfer_id_.empty()) watch_->StreamBroke(transfer_id_, status);
    bool now;
    {
      absl::MutexLock lock(&mutex_);
      end_ = status;
      now = !writing_;
    }
    if (now) Finish(ToGrpcStatus(status));
  }

  const IngestServiceOptions& options_;
  TransferWatch* const watch_;
  grpc::CallbackServerContext* const context_;
  const std::string tenant_;  // the caller's tenant; empty if it may act for any
  v1::WriteByLinkRequest request_;
  v1::WriteByLinkResponse answer_;  // the answer under way
  std::string transfer_id_;
  uint64_t bytes_landed_ = 0, messages_landed_ = 0;  // used by the link's thread

  absl::Mutex mutex_;
  std::deque<v1::LinkMessage> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<uint32_t> checksums_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;       // the sender has said `end`
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;       // the stream has ended before that
  PeerLink* link_ ABSL_GUARDED_BY(mutex_) = nullptr;  // while this call uses it
  v1::WriteByLinkResponse next_ ABSL_GUARDED_BY(mutex_);
  bool has_next_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

absl::Status LinkWrite::Open() {
  if (!request_.has_open()) return InvalidField("open", "must be the first message");
  const v1::WriteByLinkRequest::Open open = request_.open();
  SLUICE_RETURN_IF_ERROR(CheckName("open.transfer_id", open.transfer_id()));
  SLUICE_RETURN_IF_ERROR(CheckName("open.link_id", open.link_id(), kMaxLinkIdBytes));
  if (!tenant_.empty()) {
    SLUICE_RETURN_IF_ERROR(options_.transfers->CheckOwner(open.transfer_id(), tenant_));
  }
  SLUICE_RETURN_IF_ERROR(options_.transfers->Get(open.transfer_id(), 0).status());
  transfer_id_ = open.transfer_id();
  if (options_.links == nullptr) {
    return Refuse(absl::FailedPreconditionError(
        "kv_transport is grpc at the decode node: set nccl on both nodes"));
  }
  PeerLinks& links = options_.links->links();
  if (open.transport() != links.transport()) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("the decode node's device has links of ", links.transport(), ", this node's ",
                     open.transport().substr(0, kMaxNameBytes))));
  }
  PeerLinkOptions link;
  link.id = open.link_id();
  if (link.id.empty()) {
    absl::StatusOr<std::string> id = links.NewId();
    if (!id.ok()) return Refuse(id.status());
    link.id = *std::move(id);
    link.message_bytes = options_.link_message_bytes;
    if (const absl::Status made = options_.links->Make(link); !made.ok()) return Refuse(made);
    Say([&](v1::WriteByLinkResponse& answer) {
      answer.set_link_id(link.id);
      answer.set_message_bytes(link.message_bytes);
      answer.set_depth(static_cast<uint32_t>(link.depth));
    });
  }
  const absl::Status posted = options_.links->Post(
      link.id, [this](PeerLink& to) { return Land(to); },
      [this] { End(absl::UnavailableError("the link has failed, or could not be made")); });
  if (absl::IsNotFound(posted)) {
    Say([](v1::WriteByLinkResponse& answer) { answer.set_unknown_link(true); });
    End(absl::OkStatus());
    return absl::OkStatus();
  }
  return posted.ok() ? posted : Refuse(posted);
}

absl::Status LinkWrite::Land(PeerLink& link) {
  {
    absl::MutexLock lock(&mutex_);
    link_ = &link;
  }
  absl::Status failed;
  absl::Status status = Guarded("WriteByLink", [&] { return LandAll(link, &failed); });
  {
    absl::MutexLock lock(&mutex_);
    link_ = nullptr;
  }
  End(status.ok() ? failed : status);
  return status;
}

absl::Status LinkWrite::LandAll(PeerLink& link, absl::Status* failed) {
  Say([](v1::WriteByLinkResponse& answer) { answer.set_ready(true); });
  LinkLanding landing(&link, options_.transfers, transfer_id_);
  while (true) {
    SLUICE_ASSIGN_OR_RETURN(const Turn turn, Next(landing));
    if (turn.over) return absl::OkStatus();
    if (turn.message.has_value()) {
      const auto& chunks = turn.message->chunks();
      if (chunks.size() > kMaxLinkChunks) {
        return InvalidField("message.chunks", absl::StrCat("has ", chunks.size(), " entries; send ",
                                                           kMaxLinkChunks, " at most"));
      }
      const std::vector<const v1::LinkChunk*> list(chunks.pointer_begin(), chunks.pointer_end());
      // Messages behind one that failed are dropped, so that the link stays in order.
      SLUICE_RETURN_IF_ERROR(failed->ok() ? landing.Ask(list) : landing.Drop(list));
      continue;
    }
    if (!turn.crc32c.has_value()) {
      SLUICE_RETURN_IF_ERROR(landing.Arrive());
      continue;
    }
    const bool sound = failed->ok();
    for (const LinkLanding::Landed& landed : landing.Land(*turn.crc32c)) {
      if (landed.blocks.ok() && bytes_landed_ == 0) watch_->StreamBegan(transfer_id_);
      watch_->ChunkEnded(landed.blocks, landed.bytes);
      if (landed.blocks.ok()) bytes_landed_ += landed.bytes;
      failed->Update(landed.blocks.status());
    }
    if (!sound) continue;
    messages_landed_ += failed->ok() ? 1 : 0;
    Say([&](v1::WriteByLinkResponse& answer) {
      answer.set_messages_landed(messages_landed_);
      answer.set_failed(!failed->ok());
    });
  }
}

absl::StatusOr<LinkWrite::Turn> LinkWrite::Next(const LinkLanding& landing) {
  Turn turn;
  absl::MutexLock lock(&mutex_);
  const auto asks = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !waiting_.empty() && !landing.full();
  };
  const auto lands = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !checksums_.empty() && landing.arrived();
  };
  const auto any = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return asks() || lands() || closed_ || broken_ || full();
  };
  if (!landing.moving()) mutex_.Await(absl::Condition(&any));
  if (broken_) return absl::CancelledError("the stream of a push by link broke off");
  if (asks()) {
    waiting_bytes_ -= waiting_.front().ByteSizeLong();
    turn.message = std::move(waiting_.front());
    waiting_.pop_front();
  } else if (lands()) {
    // It goes before the next arrival, since it makes room to ask for another message.
    turn.crc32c = checksums_.front();
    checksums_.pop_front();
  } else if (landing.moving()) {
    return turn;
  } else if (landing.arrived()) {
    return InvalidField("crc32c", "is missing for a message whose bytes have come");
  } else if (!closed_) {
    return InvalidField("crc32c", "has come for more messages than were sent");
  } else {
    turn.over = true;
  }
  ReadOn();
  return turn;
}

}  // namespace

grpc::ServerBidiReactor<v1::WriteByLinkRequest, v1::WriteByLinkResponse>* NewLinkWrite(
    const IngestServiceOptions& options, TransferWatch* watch,
    grpc::CallbackServerContext* context) {
  return new LinkWrite(options, watch, context);
}

}  // namespace sluice
