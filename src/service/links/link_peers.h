// The calling node's ends of links to other nodes (src/device/peer_link.h). There is one link to an
// address, made when it is first needed. Calls that want it take turns. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/device/peer_link.h"
#include "src/metrics/metrics.h"

namespace sluice {

// The maximum number of chunks of a message.
inline constexpr int kMaxLinkChunks = 1024;
// Returns the largest message of a decode node's links, for chunks of up to `max_chunk_bytes`: in
// shared memory a chunk, of 8 MiB at most. Over NCCL, which takes some 100 us to begin a message,
// it is four times as large. Four messages are under way, so that a link takes 32 MiB of /dev/shm,
// or 128 MiB of HBM at either end.
size_t LinkMessageBytes(size_t max_chunk_bytes, const PeerLinks& links);

// Belongs to the call that has its turn.
struct LinkPeer {
  std::string address;
  std::string id;                  // of `link`
  size_t message_bytes = 0;        // of its largest message
  std::unique_ptr<PeerLink> link;  // null: there is none
  bool had_link = false;
  absl::Time ask_at = absl::InfinitePast();
  absl::Status refused;  // why nothing is asked before ask_at
};

class LinkPeers {
 public:
  struct Options {
    std::shared_ptr<PeerLinks> links;
    bool sends = false;  // this node's ends are the sending ones
    // For a message, a call and the caller's turn; a link has twice as long to be made.
    absl::Duration deadline = absl::Seconds(5);
    // A node that takes no part in links is not asked again for this long.
    absl::Duration ask_again = absl::Seconds(30);
    size_t max_links = 8;  // the least used link goes when another is made
  };
  explicit LinkPeers(Options options);

  // Waits until this caller has the peer alone, which it has until it drops the pointer. This
  // object outlives that. UNAVAILABLE: the turn did not come within the deadline.
  absl::StatusOr<std::shared_ptr<LinkPeer>> Enter(const std::string& address);
  // Ends the peer's link, and keeps `why` for those who come before it is time to ask again.
  // Returns `why`.
  absl::Status Refuse(LinkPeer& peer, const absl::Status& why) const;
  // Joins the link `options.id` of the size that `options` says, and gives it to the peer. Returns
  // the errors of PeerLinks::Join.
  absl::Status Join(LinkPeer& peer, PeerLinkOptions options) const;

  PeerLinks& links() const { return *options_.links; }
  absl::Duration deadline() const { return options_.deadline; }
  KvTransport transport() const;

 private:
  struct Entry {
    LinkPeer peer;
    // Guarded by mutex_:
    bool in_use = false;
    absl::Time used;
  };
  const Options options_;
  absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
