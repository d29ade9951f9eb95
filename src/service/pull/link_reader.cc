#include "src/service/pull/link_reader.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/peer_link.h"
#include "src/service/links/link_landing.h"

namespace sluice {

LinkReader::LinkReader(Options options) : options_(std::move(options)), peers_(options_.peers) {}

LinkReader::Result LinkReader::Run(const Read& read) {
  Result result;
  const absl::StatusOr<std::shared_ptr<LinkPeer>> peer = peers_.Enter(read.address);
  if (!peer.ok()) {
    result.why = peer.status();
    return result;
  }
  const absl::StatusOr<v1::ReadByLinkResponse> coming = Ask(**peer, read, &result);
  if (coming.ok()) {
    Land(**peer, read, *coming, &result);
  } else {
    result.why = coming.status();
  }
  return result;
}

absl::StatusOr<v1::ReadByLinkResponse> LinkReader::Ask(LinkPeer& peer, const Read& read,
                                                       Result* result) {
  result->outcome = LinkUse::kRefused;
  if (absl::Now() < peer.ask_at) return peer.refused;
  const auto refuse = [&](const absl::Status& why) { return peers_.Refuse(peer, why); };
  v1::ReadByLinkRequest request;
  *request.mutable_read() = read.request;
  request.set_message_bytes(options_.message_bytes);
  request.set_depth(static_cast<uint32_t>(options_.depth));
  std::string id = peer.id;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const bool fresh = peer.link == nullptr;
    if (fresh) {
      const absl::StatusOr<std::string> made = peers_.links().NewId();
      if (!made.ok()) return refuse(made.status());
      id = *made;
    }
    request.set_link_id(id);
    request.set_new_link(fresh);
    absl::StatusOr<v1::ReadByLinkResponse> answer = read.call(request, peers_.deadline());
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
      options.id = id;
      options.message_bytes = options_.message_bytes;
      options.depth = options_.depth;
      const absl::Status joined = peers_.Join(peer, options);
      if (!joined.ok()) return refuse(joined);
    }
    return answer;
  }
  return refuse(absl::UnavailableError("the source forgets its links at once"));
}

void LinkReader::Land(LinkPeer& peer, const Read& read, const v1::ReadByLinkResponse& coming,
                      Result* result) {
  result->outcome = LinkUse::kDone;
  absl::Status broken;
  const auto take = [&](LinkLanding& landing) -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<LinkLanding::Landed> message, landing.Await());
    const LinkLanding::Landed& landed = message.front();  // a pull's messages have one chunk each
    result->bytes += landed.blocks.ok() ? landed.bytes : 0;
    const absl::Status& status = landed.blocks.status();
    if (absl::IsDataLoss(status)) {
      result->outcome = LinkUse::kBroken;
      result->why = status;
    } else if (absl::IsInvalidArgument(status)) {
      result->transfer.Update(
          WithReason(absl::FailedPreconditionError(
                         absl::StrCat("it sent a chunk that does not fit: ", status.message())),
                     reasons::kSourceMismatch));
    } else {
      result->transfer.Update(status);
    }
    return absl::OkStatus();
  };
  {
    LinkLanding landing(peer.link.get(), read.transfers, read.transfer_id);
    for (const v1::LinkChunk& each : coming.chunks()) {
      const v1::LinkChunk* const chunk = &each;
      if (landing.full()) broken = take(landing);
      if (read.unwanted()) broken.Update(absl::CancelledError("nobody waits for it any more"));
      // If the transfer takes no more, the rest still comes, so that the link stays in order.
      if (broken.ok()) broken = landing.Ask({&chunk, 1});
      if (!broken.ok()) break;
    }
    while (broken.ok() && landing.moving()) broken = take(landing);
  }
  if (broken.ok()) return;
  peer.link.reset();
  result->outcome = LinkUse::kBroken;
  result->why = broken;
}

}  // namespace sluice
