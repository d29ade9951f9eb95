// Admin: what runs here and how full it is. The engine's thread answers what only it knows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/v1/admin.pb.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/service/grpc_service.h"
#include "src/service/readiness.h"

namespace sluice {

struct AdminServiceOptions {
  v1::GetModelResponse model;  // the whole answer of GetModel
  uint32_t max_sequences = 0;
  // Everything outlives the service.
  Engine* engine = nullptr;
  const TransferTable* transfers = nullptr;
  std::vector<const PagePool*> pools;
  const Readiness* readiness = nullptr;
  bool allow_failpoints = false;
};

GrpcService NewAdminService(AdminServiceOptions options);

}  // namespace sluice
