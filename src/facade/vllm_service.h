// vllm.grpc.engine.VllmEngine over a node of ours, as the gateway `smg` speaks it: the same
// requests as sluice.v1 in other words (proto/facade/vllm_engine.proto says which).
#pragma once

#include <memory>

#include "src/facade/node_info.h"
#include "src/service/generate_call.h"
#include "src/service/grpc_service.h"

namespace sluice {

struct FacadeOptions {
  NodeInfo info;
  LoadSource load;
  const Readiness* readiness = nullptr;  // outlives the service
  GenerateOptions generate;
};

GrpcService NewVllmService(FacadeOptions options);

}  // namespace sluice
