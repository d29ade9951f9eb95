// Translates the messages of sglang.grpc.scheduler. Pure except for the messages that it makes.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "facade/sglang_scheduler.pb.h"
#include "src/facade/node_info.h"
#include "src/request/request.h"
#include "src/service/generate/generate_reactor.h"

namespace sluice {

// Converts as its counterpart in vllm_dialect.h does.
absl::StatusOr<Request> FromProto(const sglang::grpc::scheduler::GenerateRequest& request,
                                  uint32_t vocab_size, uint32_t max_context);

// Returns the dialect of one call. `request` and `options` outlive it.
std::unique_ptr<GenerateDialectOf<sglang::grpc::scheduler::GenerateResponse>> NewSglangDialect(
    NodeInfo::Role role, const sglang::grpc::scheduler::GenerateRequest& request,
    const GenerateOptions& options);

}  // namespace sluice
