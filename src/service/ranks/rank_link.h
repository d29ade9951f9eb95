// RankLink joins the ranks of a node by gRPC: rank 0 serves RankService, and each of the others
// keeps connections to it: one for what they tell one another (rank_roster.h), one for bytes of
// caches from rank 0 (far_memory.h), and one for claims of pages (chunk_claims.h). It is the form
// of RankChannel and RankMembers for ranks on several hosts.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_members.h"
#include "src/kv/far_heads.h"
#include "src/kv/page_pool.h"
#include "src/service/access/tls_files.h"
#include "src/service/ranks/chunk_claims.h"

namespace sluice {

class Access;
class AccessLog;

class RankLink : public RankChannel, public RankMembers {
 public:
  struct Options {
    // Where rank 0 is called, the same on each. Rank 0 listens on this host if it is a loopback
    // address, else on its port of every address, since it may be a name that others resolve.
    std::string leader;
    int rank = 0;
    int size = 1;
    std::string version;
    std::string host;  // empty: HostName()
    absl::Duration join_timeout = absl::Seconds(60);
    absl::Duration deadline = absl::Seconds(30);
    absl::Duration still_limit = absl::Seconds(3);
    // Rank 0 asks `access` about every call, with TLS; the others show their certificate. Both
    // outlive the link.
    TlsFiles tls;
    const Access* access = nullptr;
    AccessLog* access_log = nullptr;
  };
  // Waits until every rank has joined. Errors:
  //   UNAVAILABLE          ranks did not come in time, which it names; rank 0 cannot listen
  //   INVALID_ARGUMENT     the rank is out of range, or rank 0 expects another number of ranks
  //   FAILED_PRECONDITION  rank 0 is of another version
  //   ALREADY_EXISTS       another process is that rank
  //   UNAUTHENTICATED, PERMISSION_DENIED  rank 0's access_file does not let this rank in
  static absl::StatusOr<std::unique_ptr<RankLink>> Join(const Options& options);
  // Names this host and its /dev/shm; other containers of the host may have another one.
  static std::string HostName();

  // Returns what writes caches to the other ranks' pools. REQUIRES: rank 0.
  virtual FarHeads* far() = 0;
  // Returns what serves chunks that come to the other ranks' ports. REQUIRES: rank 0.
  virtual ChunkClaims* claims() = 0;
  // Returns where a rank that lands bytes takes chunks itself; empty: nowhere. REQUIRES: rank 0.
  virtual std::string IngestAddress(int rank) = 0;
  // Lands bytes of caches from rank 0 in the pool, from now until it is destroyed.
  class Landing {
   public:
    virtual ~Landing() = default;
  };
  // UNAVAILABLE: rank 0 does not answer. The pool outlives the landing, and it the link. Rank 0
  // hears that senders may come to `ingest_address`, unless it is empty. REQUIRES: not rank 0.
  virtual absl::StatusOr<std::unique_ptr<Landing>> LandIn(const PagePool& pool,
                                                          const std::string& ingest_address) = 0;
  // Opens a stream in which rank 0 is asked for the pages of chunks. When the node fails, or rank 0
  // ends, its calls end. The link outlives it. Thread-safe. REQUIRES: not rank 0.
  virtual std::unique_ptr<ClaimCall> NewClaimCall() = 0;
};

}  // namespace sluice
