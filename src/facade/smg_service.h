// Serves a node to the gateway `smg`: the same requests as in sluice.v1, in the protocol of the
// engine that the gateway takes the node for (see proto/facade).
#pragma once

#include <memory>
#include <string>

#include "src/facade/node_info.h"
#include "src/service/generate/generate_call.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

struct FacadeOptions {
  NodeInfo info;
  LoadSource load;
  const Readiness* readiness = nullptr;  // outlives the service
  GenerateOptions generate;
};

// Returns the service for the setting `gateway`: vllm.grpc.engine.VllmEngine for "vllm",
// sglang.grpc.scheduler.SglangScheduler for "sglang". A node serves only one of them, because smg
// asks a node for all protocols that smg knows and takes the first that answers.
GrpcService NewGatewayService(const std::string& gateway, FacadeOptions options);

}  // namespace sluice
