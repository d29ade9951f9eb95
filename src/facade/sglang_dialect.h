// sglang.grpc.scheduler's words for a request and its tokens. Pure but for the messages it makes.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "facade/sglang_scheduler.pb.h"
#include "src/facade/node_info.h"
#include "src/request/request.h"
#include "src/service/generate/generate_reactor.h"

namespace sluice {

// As its sister in vllm_dialect.h.
absl::StatusOr<Request> FromProto(const sglang::grpc::scheduler::GenerateRequest& request,
                                  uint32_t vocab_size, uint32_t max_context);

// The dialect of one call. `request` and `options` outlive it.
std::unique_ptr<GenerateDialectOf<sglang::grpc::scheduler::GenerateResponse>> NewSglangDialect(
    NodeInfo::Role role, const sglang::grpc::scheduler::GenerateRequest& request,
    const GenerateOptions& options);

}  // namespace sluice
