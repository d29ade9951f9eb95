#include "src/service/pull/link_reader.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"

namespace sluice {

struct LinkReader::Peer {
  // Guarded by the reader's mutex:
  bool in_use = false;
  absl::Time used;
  // These belong to the caller that has the peer:
  std::string id;                  // of `link`
  std::unique_ptr<PeerLink> link;  // null: there is none
  absl::Time ask_at = absl::InfinitePast();
  absl::Status refused;  // why nothing is asked before ask_at
};

// One chunk that was asked for over the link.
struct LinkReader::Landing {
  std::unique_ptr<ChunkLanding> chunk;  // null: its bytes are dropped
  uint64_t bytes = 0;
};

LinkReader::LinkReader(Options options) : options_(std::move(options)) {}

LinkReader::~LinkReader() = default;

std::shared_ptr<LinkReader::Peer> LinkReader::Enter(const std::string& address) {
  std::shared_ptr<Peer> gone;  // its link ends without the lock
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<Peer>& entry = peers_[address];
  if (entry == nullptr) {
    entry = std::make_shared<Peer>();
    if (peers_.size() > options_.max_links) {
      auto oldest = peers_.end();
      for (auto it = peers_.begin(); it != peers_.end(); ++it) {
        if (it->second->in_use || it->first == address) continue;
        if (oldest == peers_.end() || it->second->used < oldest->second->used) oldest = it;
      }
      if (oldest != peers_.end()) {
        gone = std::move(oldest->second);
        peers_.erase(oldest);
      }
    }
  }
  const std::shared_ptr<Peer> peer = peers_[address];
  const auto free = [&peer = *peer] { return !peer.in_use; };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), options_.deadline)) return nullptr;
  peer->in_use = true;
  peer->used = absl::Now();
  return peer;
}

void LinkReader::Leave(const std::shared_ptr<Peer>& peer) {
  absl::MutexLock lock(&mutex_);
  peer->in_use = false;
  peer->used = absl::Now();
}

LinkReader::Result LinkReader::Run(const Read& read) {
  Result result;
  const std::shared_ptr<Peer> peer = Enter(read.address);
  if (peer == nullptr) {
    result.why = absl::UnavailableError(
        absl::StrCat("other reads have the link for ", absl::FormatDuration(options_.deadline)));
    return result;
  }
  const absl::StatusOr<v1::ReadByLinkResponse> coming = Ask(*peer, read, &result);
  if (coming.ok()) {
    Land(*peer, read, *coming, &result);
  } else {
    result.why = coming.status();
  }
  Leave(peer);
  return result;
}

absl::StatusOr<v1::ReadByLinkResponse> LinkReader::Ask(Peer& peer, const Read& read,
                                                       Result* result) {
  result->outcome = LinkRead::kRefused;
  if (absl::Now() < peer.ask_at) return peer.refused;
  const auto refuse = [&](const absl::Status& why) {
    peer.link.reset();
    peer.ask_at = absl::Now() + options_.ask_again;
    peer.refused = why;
    return why;
  };
  v1::ReadByLinkRequest request;
  *request.mutable_read() = read.request;
  request.set_message_bytes(options_.message_bytes);
  request.set_depth(static_cast<uint32_t>(options_.depth));
  const bool had = peer.link != nullptr;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const bool fresh = peer.link == nullptr;
    if (fresh) {
      const absl::StatusOr<std::string> id = options_.links->NewId();
      if (!id.ok()) return refuse(id.status());
      peer.id = *id;
    }
    request.set_link_id(peer.id);
    request.set_new_link(fresh);
    absl::StatusOr<v1::ReadByLinkResponse> answer = read.call(request, options_.deadline);
    if (!answer.ok()) {
      // The source may have begun to send, so that the order of messages is not known any more; but
      // not if it does not hold the prompt.
      if (!absl::IsNotFound(answer.status())) peer.link.reset();
      return absl::IsUnimplemented(answer.status()) ? refuse(answer.status()) : answer.status();
    }
    if (!answer->refused().empty()) {
      return refuse(absl::FailedPreconditionError(answer->refused()));
    }
    if (answer->unknown_link()) {  // the source has begun anew, or needed the memory
      peer.link.reset();
      continue;
    }
    if (fresh) {
      PeerLinkOptions options;
      options.id = peer.id;
      options.message_bytes = options_.message_bytes;
      options.depth = options_.depth;
      options.deadline = options_.deadline;
      options.join_timeout = 2 * options_.deadline;
      absl::StatusOr<std::unique_ptr<PeerLink>> link = options_.links->Join(options);
      if (!link.ok()) return refuse(link.status());
      peer.link = *std::move(link);
      Log(LogLevel::kInfo, "a link to a prefill node is made",
          {{"source", read.address}, {"transport", transport()}, {"again", had}});
    }
    return answer;
  }
  return refuse(absl::UnavailableError("the source forgets its links at once"));
}

void LinkReader::Land(Peer& peer, const Read& read, const v1::ReadByLinkResponse& coming,
                      Result* result) {
  result->outcome = LinkRead::kDone;
  std::deque<Landing> landing;
  // The link has ended before a landing goes that it may write to.
  const auto broken = [&](const absl::Status& why) {
    peer.link.reset();
    result->outcome = LinkRead::kBroken;
    result->why = why;
  };
  const auto refused = [&](const absl::Status& why) {
    if (absl::IsDataLoss(why)) {
      result->outcome = LinkRead::kBroken;
      result->why = why;
    } else if (result->transfer.ok()) {
      result->transfer = why;
    }
  };
  const auto take = [&]() -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(const uint32_t crc, peer.link->Await());
    const Landing oldest = std::move(landing.front());
    landing.pop_front();
    if (oldest.chunk == nullptr) return absl::OkStatus();
    oldest.chunk->Received(crc);
    const absl::Status status = oldest.chunk->Finish().status();
    if (!status.ok()) {
      refused(status);
    } else {
      result->bytes += oldest.bytes;
    }
    return absl::OkStatus();
  };
  for (const v1::LinkChunk& chunk : coming.chunks()) {
    if (landing.size() == static_cast<size_t>(peer.link->depth())) {
      const absl::Status status = take();
      if (!status.ok()) return broken(status);
    }
    if (read.unwanted()) return broken(absl::CancelledError("nobody waits for it any more"));
    const v1::ChunkHeader& h = chunk.header();
    ChunkHeader header;
    header.transfer_id = read.transfer_id;
    header.kind = h.kind();
    for (const auto& [from, to] : {std::pair{h.layer(), &header.layer},
                                   {h.head_begin(), &header.head_begin},
                                   {h.head_end(), &header.head_end},
                                   {h.token_begin(), &header.token_begin},
                                   {h.token_end(), &header.token_end}}) {
      *to = static_cast<uint32_t>(std::min<uint64_t>(from, UINT32_MAX));  // refused as it is
    }
    header.crc32c = h.crc32c();
    Landing next;
    std::vector<PeerLink::Piece> pieces;
    absl::StatusOr<std::unique_ptr<ChunkLanding>> begun =
        read.transfers->BeginChunk(header, chunk.bytes());
    if (begun.ok()) {
      next.chunk = *std::move(begun);
      next.bytes = chunk.bytes();
      for (const ChunkLanding::Target& target : next.chunk->Targets()) {
        pieces.push_back({target.data, target.bytes});
      }
    } else {
      // The rest still comes, and is dropped, so that the link stays in order for the next read.
      refused(
          absl::IsInvalidArgument(begun.status())
              ? WithReason(absl::FailedPreconditionError(absl::StrCat(
                               "it sent a chunk that does not fit: ", begun.status().message())),
                           reasons::kSourceMismatch)
              : begun.status());
      pieces.push_back({nullptr, chunk.bytes()});
    }
    landing.push_back(std::move(next));
    const absl::Status status = peer.link->Receive(pieces);
    if (!status.ok()) return broken(status);
  }
  while (!landing.empty()) {
    const absl::Status status = take();
    if (!status.ok()) return broken(status);
  }
}

}  // namespace sluice
