// Reads held caches over links to prefill nodes (src/service/links/): one link to each, on which
// reads take turns. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sluice/v1/source.pb.h"
#include "src/metrics/metrics.h"
#include "src/service/links/link_peers.h"

namespace sluice {

class TransferTable;

class LinkReader {
 public:
  struct Options {
    LinkPeers::Options peers;
    size_t message_bytes = size_t{8} << 20;
    int depth = 4;
  };
  explicit LinkReader(Options options);

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
    LinkUse outcome = LinkUse::kRefused;
    uint64_t bytes = 0;  // of the chunks that have landed
    absl::Status why;    // with kRefused and kBroken
    // Why the transfer takes no chunks, whoever brings them: the errors of PullStream::Join about
    // chunks.
    absl::Status transfer;
  };
  // Blocks until everything that the source sends has landed, or the link has failed.
  Result Run(const Read& read);
  const LinkPeers& peers() const { return peers_; }

 private:
  // Asks the source to send, over a new link if there is none. A refusal is in the result.
  absl::StatusOr<v1::ReadByLinkResponse> Ask(LinkPeer& peer, const Read& read, Result* result);
  void Land(LinkPeer& peer, const Read& read, const v1::ReadByLinkResponse& coming, Result* result);

  const Options options_;
  LinkPeers peers_;
};

}  // namespace sluice
