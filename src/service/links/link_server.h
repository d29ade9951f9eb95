// The ends of links that other nodes ask this one for (src/device/peer_link.h). Each link has a
// thread, which makes it, uses it, and ends it when it fails. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/device/peer_link.h"

namespace sluice {

class LinkServer {
 public:
  struct Options {
    std::shared_ptr<PeerLinks> links;
    bool sends = false;  // this node's ends are the sending ones
    // For a message; a link has twice as long to be made.
    absl::Duration deadline = absl::Seconds(5);
    // A link takes memory: message_bytes x depth in HBM, and as much in pinned DRAM.
    size_t max_links = 8;
    size_t max_link_bytes = size_t{256} << 20;
  };
  explicit LinkServer(Options options);
  // Fails the links and waits for what uses them.
  ~LinkServer();

  PeerLinks& links() const { return *options_.links; }
  // Returns why no such link can be made: INVALID_ARGUMENT names the field of ReadByLinkRequest
  // that is out of range; FAILED_PRECONDITION: the other end's device, or host, has no link with
  // this.
  absl::Status CheckNew(const PeerLinkOptions& options) const;
  // Puts an end of a new link up. The least used link goes if there are too many; if all are in
  // use: RESOURCE_EXHAUSTED.
  absl::Status Make(const PeerLinkOptions& options);
  // Runs `use` on the link's thread, behind what was posted before. A link on which it fails is
  // ended. If the link has failed until then, `lost` runs in its place. NOT_FOUND: there is no such
  // link; RESOURCE_EXHAUSTED: too much waits for it. Neither is called then.
  absl::Status Post(
      const std::string& id, std::function<absl::Status(PeerLink&)> use,
      std::function<void()> lost = [] {});

 private:
  struct Link;
  const Options options_;
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<Link>> links_ ABSL_GUARDED_BY(mutex_);  // the last used ones first
};

}  // namespace sluice
