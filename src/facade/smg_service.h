// A node of ours as the gateway `smg` drives it: the same requests as sluice.v1 in the words of the
// engine that the gateway takes the node for (proto/facade says which).
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

// Of setting `gateway`: "vllm", vllm.grpc.engine.VllmEngine, or "sglang",
// sglang.grpc.scheduler.SglangScheduler. A node serves one alone, for smg asks it for all that smg
// knows and takes the first that answers.
GrpcService NewGatewayService(const std::string& gateway, FacadeOptions options);

}  // namespace sluice
