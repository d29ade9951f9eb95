// A node of ours as the gateway `smg` drives it: the same requests as sluice.v1 in the words of the
// engine that the gateway takes the node for (proto/facade says which).
#pragma once

#include <memory>
#include <string>

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

// vllm.grpc.engine.VllmEngine.
GrpcService NewVllmService(FacadeOptions options);
// sglang.grpc.scheduler.SglangScheduler.
GrpcService NewSglangService(FacadeOptions options);
// That of setting `gateway`: "vllm" or "sglang". One alone is served, for smg asks a node for all
// that it knows and takes the first that answers.
GrpcService NewGatewayService(const std::string& gateway, FacadeOptions options);

}  // namespace sluice
