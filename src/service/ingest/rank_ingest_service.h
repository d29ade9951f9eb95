// KvIngest at the port of a rank other than 0: chunks of its own heads land in its pool, and rank 0
// keeps the transfers. Every other call is UNIMPLEMENTED, and names rank 0.
#pragma once

#include <string>

#include "src/kv/page_pool.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Access;
class RankLink;

struct RankIngestOptions {
  // All of these outlive the service.
  RankLink* link = nullptr;
  const PagePool* pool = nullptr;
  const Access* access = nullptr;  // null without TLS
  std::string rank_zero;           // where rank 0 serves, for messages
};

GrpcService NewRankIngestService(const RankIngestOptions& options);

}  // namespace sluice
