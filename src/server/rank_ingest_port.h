// RankIngestPort is where a rank other than 0 takes KV caches for itself (rank_ingest_listen),
// where ranks meet by gRPC: KvIngest.Write of chunks of its own heads.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/kv/page_pool.h"
#include "src/server/security.h"
#include "src/service/access/access_log.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ranks/rank_link.h"

namespace sluice {

class RankIngestPort {
 public:
  // Opens the port; returns null where there is none. All outlive it. The error names the setting.
  static absl::StatusOr<std::unique_ptr<RankIngestPort>> Open(const Config& config,
                                                              const Security& security,
                                                              RankLink* link, const PagePool* pool);

  // Returns the address that senders are told, whose host rank 0 replaces if it stands for all.
  const std::string& advertised() const { return advertised_; }

 private:
  RankIngestPort() = default;

  std::unique_ptr<AccessLog> access_log_;  // null: none is kept
  std::unique_ptr<GrpcServer> grpc_;
  std::string advertised_;
};

}  // namespace sluice
