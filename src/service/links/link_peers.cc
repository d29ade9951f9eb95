#include "src/service/links/link_peers.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"

namespace sluice {

size_t LinkMessageBytes(size_t max_chunk_bytes, const PeerLinks& links) {
  const size_t chunk = std::min(max_chunk_bytes, size_t{8} << 20);
  return chunk * (links.transport() == std::string_view("nccl") ? 4 : 1);
}

LinkPeers::LinkPeers(Options options) : options_(std::move(options)) {}

absl::StatusOr<std::shared_ptr<LinkPeer>> LinkPeers::Enter(const std::string& address) {
  std::shared_ptr<Entry> gone;  // its link ends without the lock
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<Entry> entry = entries_[address];
  if (entry == nullptr) {
    entry = entries_[address] = std::make_shared<Entry>();
    entry->peer.address = address;
    if (entries_.size() > options_.max_links) {
      auto oldest = entries_.end();
      for (auto it = entries_.begin(); it != entries_.end(); ++it) {
        if (it->second->in_use || it->first == address) continue;
        if (oldest == entries_.end() || it->second->used < oldest->second->used) oldest = it;
      }
      if (oldest != entries_.end()) {
        gone = std::move(oldest->second);
        entries_.erase(oldest);
      }
    }
  }
  const auto free = [&entry = *entry] { return !entry.in_use; };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), options_.deadline)) {
    return absl::UnavailableError(
        absl::StrCat("others have the link for ", absl::FormatDuration(options_.deadline)));
  }
  entry->in_use = true;
  entry->used = absl::Now();
  LinkPeer* const peer = &entry->peer;
  return std::shared_ptr<LinkPeer>(peer, [this, entry = std::move(entry)](LinkPeer*) {
    absl::MutexLock leave(&mutex_);
    entry->in_use = false;
    entry->used = absl::Now();
  });
}

absl::Status LinkPeers::Refuse(LinkPeer& peer, const absl::Status& why) const {
  peer.link.reset();
  peer.ask_at = absl::Now() + options_.ask_again;
  peer.refused = why;
  return why;
}

absl::Status LinkPeers::Join(LinkPeer& peer, PeerLinkOptions options) const {
  options.sends = options_.sends;
  options.deadline = options_.deadline;
  options.join_timeout = 2 * options_.deadline;
  SLUICE_ASSIGN_OR_RETURN(peer.link, options_.links->Join(options));
  peer.id = options.id;
  peer.message_bytes = options.message_bytes;
  Log(LogLevel::kInfo, "a link to another node is made",
      {{"other", peer.address},
       {"sends", options_.sends},
       {"transport", options_.links->transport()},
       {"again", std::exchange(peer.had_link, true)}});
  return absl::OkStatus();
}

KvTransport LinkPeers::transport() const {
  return options_.links->transport() == std::string_view("nccl") ? KvTransport::kNccl
                                                                 : KvTransport::kSharedMemory;
}

}  // namespace sluice
