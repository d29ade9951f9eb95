// vllm.grpc.engine's words for a request and its tokens. Pure but for the messages it makes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "facade/vllm_engine.pb.h"
#include "src/facade/node_info.h"
#include "src/request/request.h"
#include "src/service/generate/generate_reactor.h"

namespace sluice {

// What of `request` a Request says: all but handoff, deadline and sink. Whatever this server does
// not do is INVALID_ARGUMENT and named, fields with numbers that it does not know as well; nothing
// is passed over.
absl::StatusOr<Request> FromProto(const vllm::grpc::engine::GenerateRequest& request,
                                  uint32_t vocab_size, uint32_t max_context);

// The dialect of one call. `request` and `options` outlive it.
std::unique_ptr<GenerateDialectOf<vllm::grpc::engine::GenerateResponse>> NewVllmDialect(
    NodeInfo::Role role, const vllm::grpc::engine::GenerateRequest& request,
    const GenerateOptions& options);

}  // namespace sluice
