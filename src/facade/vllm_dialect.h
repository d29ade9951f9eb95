// Translates the messages of vllm.grpc.engine. Pure except for the messages that it makes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "facade/vllm_engine.pb.h"
#include "src/facade/node_info.h"
#include "src/request/request.h"
#include "src/service/generate/generate_reactor.h"

namespace sluice {

// Converts everything but handoff, deadline and sink. INVALID_ARGUMENT names whatever this server
// does not do, and fields with numbers that it does not know: nothing is ignored silently.
absl::StatusOr<Request> FromProto(const vllm::grpc::engine::GenerateRequest& request,
                                  uint32_t vocab_size, uint32_t max_context);

// Returns the dialect of one call. `request` and `options` outlive it.
std::unique_ptr<GenerateDialectOf<vllm::grpc::engine::GenerateResponse>> NewVllmDialect(
    NodeInfo::Role role, const vllm::grpc::engine::GenerateRequest& request,
    const GenerateOptions& options);

}  // namespace sluice
