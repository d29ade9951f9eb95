#include "src/server/rank_ingest_port.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/server/program.h"
#include "src/server/ranks.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/rank_ingest_service.h"
#include "src/service/wire/host_port.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// Returns where rank 0 serves, as far as its settings say, for messages to callers.
std::string RankZeroAddress(const Config& config) {
  const auto listen = ParseHostPort(config.listen());
  auto leader = ParseHostPort(config.leader());
  if (!listen.ok() || !leader.ok() || !IsAnyHost(listen->host)) return config.listen();
  leader->port = listen->port;
  return leader->ToString();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankIngestPort>> RankIngestPort::Open(const Config& config,
                                                                     const Security& security,
                                                                     RankLink* link,
                                                                     const PagePool* pool) {
  if (config.rank_ingest_listen().empty()) return nullptr;
  std::unique_ptr<RankIngestPort> out(new RankIngestPort());
  SLUICE_ASSIGN_OR_RETURN(out->access_log_, OpenAccessLog(config));
  GrpcServer::Options options;
  const absl::StatusOr<std::string> listen = AddressOfRank(config, config.rank_ingest_listen());
  if (!listen.ok()) return WithMessagePrefix(listen.status(), "rank_ingest_listen");
  options.listen = *listen;
  options.access_log = out->access_log_.get();
  options.tls = security.tls;
  options.access = security.access();
  options.connections = {config.max_connections(), config.max_connections_per_peer()};
  options.max_receive_message_bytes = MaxChunkMessageBytes(config.max_chunk_bytes());
  RankIngestOptions ingest;
  ingest.link = link;
  ingest.pool = pool;
  ingest.access = security.access();
  ingest.rank_zero = RankZeroAddress(config);
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(options, {NewRankIngestService(ingest)});
  if (!started.ok()) return WithMessagePrefix(started.status(), "rank_ingest_listen");
  out->grpc_ = *std::move(started);
  out->grpc_->SetServing(true);
  out->advertised_ = config.rank_ingest_advertise().empty() ? out->grpc_->address()
                                                            : config.rank_ingest_advertise();
  Log(LogLevel::kInfo, "this rank takes its caches itself",
      {{"rank", config.rank()},
       {"rank_ingest_listen", out->grpc_->address()},
       {"rank_ingest_advertise", out->advertised_}});
  return out;
}

}  // namespace sluice
