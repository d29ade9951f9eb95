// The decode node's ends of links to prefill nodes (src/device/peer_link.h), and reads over them.
// There is one link to a prefill node, made when it is first needed; reads take turns. Chunks land
// as those of a stream do: the same claims, checksums and leases. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "sluice/v1/source.pb.h"
#include "src/device/peer_link.h"
#include "src/metrics/metrics.h"

namespace sluice {

class TransferTable;

class LinkReader {
 public:
  struct Options {
    std::unique_ptr<PeerLinks> links;
    // For a message, the call and the caller's turn; a link has twice as long to be made.
    absl::Duration deadline = absl::Seconds(5);
    size_t message_bytes = size_t{8} << 20;
    int depth = 4;
    // A source that takes no part in links is not asked again for this long.
    absl::Duration ask_again = absl::Seconds(30);
    size_t max_links = 8;  // the least used link goes when another is made
  };
  explicit LinkReader(Options options);
  ~LinkReader();

  struct Read {
    std::string address;  // of the source
    v1::ReadRequest request;
    std::string transfer_id;             // chunks land here
    TransferTable* transfers = nullptr;  // outlives the read
    // Calls ReadByLink, within `timeout`.
    std::function<absl::StatusOr<v1::ReadByLinkResponse>(const v1::ReadByLinkRequest& request,
                                                         absl::Duration timeout)>
        call;
    std::function<bool()> unwanted;  // asked before each chunk; true ends the link
  };
  struct Result {
    // kRefused: nothing came over a link. kBroken: the link failed, or chunks lacked their
    // checksum; what has landed stays. The caller reads the rest by other means.
    LinkRead outcome = LinkRead::kRefused;
    uint64_t bytes = 0;  // of the chunks that have landed
    absl::Status why;    // with kRefused and kBroken
    // Why the transfer takes no chunks, whoever brings them: the errors of PullStream::Join about
    // chunks.
    absl::Status transfer;
  };
  // Blocks until everything that the source sends has landed, or the link has failed.
  Result Run(const Read& read);
  const char* transport() const { return options_.links->transport(); }

 private:
  struct Peer;
  struct Landing;
  // Returns the peer once this caller has it alone; null if that took longer than the deadline.
  std::shared_ptr<Peer> Enter(const std::string& address);
  void Leave(const std::shared_ptr<Peer>& peer);
  // Asks the source to send, over a new link if there is none. A refusal is in the result.
  absl::StatusOr<v1::ReadByLinkResponse> Ask(Peer& peer, const Read& read, Result* result);
  void Land(Peer& peer, const Read& read, const v1::ReadByLinkResponse& coming, Result* result);

  const Options options_;
  absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
