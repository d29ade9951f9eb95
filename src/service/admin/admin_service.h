// Admin on a decode node: says what runs here and how full the node is, and takes the node out of
// service. The engine's thread answers what only it knows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/v1/admin.pb.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/service/admin/drain_control.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class StepRecorder;

struct AdminServiceOptions {
  v1::GetModelResponse model;  // the answer of GetModel, without `role`
  uint32_t max_sequences = 0;
  // All of these outlive the service.
  Engine* engine = nullptr;
  const TransferTable* transfers = nullptr;
  // The pools of the node; of each rank where ranks have sequences of their own.
  std::vector<const PagePool*> dram, hbm;
  bool allow_failpoints = false;
  DrainControl* drain = nullptr;
  const StepRecorder* recorder = nullptr;  // the engine's; null if steps are not recorded
};

GrpcService NewAdminService(AdminServiceOptions options);

}  // namespace sluice
