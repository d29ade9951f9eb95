// Decode: sluice.v1's own dialect of Generate, and Cancel and Forget, served by an Engine.
#pragma once

#include "src/engine/engine.h"
#include "src/service/generate/generate_call.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

struct DecodeServiceOptions {
  GenerateOptions generate;
  Engine* engine = nullptr;  // outlives the service; as a rule also generate.generator
};

GrpcService NewDecodeService(const DecodeServiceOptions& options);

}  // namespace sluice
