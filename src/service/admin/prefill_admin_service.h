// Admin on a prefill node: what model it runs and how full it is. A prefill node has no sequences,
// steps or failpoints and is drained by SIGTERM alone, so every other call is refused with
// FAILED_PRECONDITION, reason PREFILL_NODE.
#pragma once

#include "sluice/v1/admin.pb.h"
#include "src/base/readiness.h"
#include "src/prefill/held_prompts.h"
#include "src/service/prefill/prompt_counts.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

struct PrefillAdminOptions {
  v1::GetModelResponse model;  // the answer of GetModel, without `role`
  // All of these outlive the service.
  const Readiness* readiness = nullptr;
  const PromptCounts* counts = nullptr;
  const HeldPrompts* held = nullptr;  // null where the node holds no prompts (hold_bytes is 0)
};

GrpcService NewPrefillAdminService(PrefillAdminOptions options);

}  // namespace sluice
