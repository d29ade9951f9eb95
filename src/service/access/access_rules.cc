#include "src/service/access/access_rules.h"

#include <algorithm>

namespace sluice {
namespace {

constexpr Roles kAnybody{Role::kPrefill, Role::kDecode, Role::kRouter, Role::kOperator,
                         Role::kMonitor};
constexpr Roles kPrefills{Role::kPrefill};
constexpr Roles kDecodes{Role::kDecode};
constexpr Roles kDecodesOrRouters{Role::kDecode, Role::kRouter};
constexpr Roles kRouters{Role::kRouter};
constexpr Roles kOperators{Role::kOperator};
constexpr Roles kWatchers{Role::kOperator, Role::kMonitor};

struct Rule {
  std::string_view method;
  Roles roles;
};

// The table has every method that a node serves, and nothing else;
// tests/unit/service/access/access_test.cc compares.
constexpr Rule kRules[] = {
    {"/sluice.v1.KvIngest/Reserve", kPrefills},
    {"/sluice.v1.KvIngest/Write", kPrefills},
    {"/sluice.v1.KvIngest/WriteByLink", kPrefills},
    {"/sluice.v1.KvIngest/Commit", kPrefills},
    {"/sluice.v1.KvIngest/Abort", kPrefills},
    {"/sluice.v1.KvIngest/GetTransfer", kPrefills},

    {"/sluice.v1.Decode/Generate", kRouters},
    {"/sluice.v1.Decode/Cancel", kRouters},
    {"/sluice.v1.Decode/Forget", kRouters},

    {"/sluice.v1.Prefill/Run", kRouters},
    {"/sluice.v1.Prefill/GetModel", kAnybody},

    {"/vllm.grpc.engine.VllmEngine/Generate", kRouters},
    {"/vllm.grpc.engine.VllmEngine/HealthCheck", kAnybody},
    {"/vllm.grpc.engine.VllmEngine/FlushCache", kRouters},
    {"/vllm.grpc.engine.VllmEngine/Abort", kRouters},
    {"/vllm.grpc.engine.VllmEngine/GetModelInfo", kAnybody},
    {"/vllm.grpc.engine.VllmEngine/GetServerInfo", kRouters},
    {"/vllm.grpc.engine.VllmEngine/GetLoads", kRouters},
    {"/vllm.grpc.engine.VllmEngine/GetTokenizer", kRouters},

    {"/sglang.grpc.scheduler.SglangScheduler/Generate", kRouters},
    {"/sglang.grpc.scheduler.SglangScheduler/HealthCheck", kAnybody},
    {"/sglang.grpc.scheduler.SglangScheduler/FlushCache", kRouters},
    {"/sglang.grpc.scheduler.SglangScheduler/Abort", kRouters},
    {"/sglang.grpc.scheduler.SglangScheduler/GetModelInfo", kAnybody},
    {"/sglang.grpc.scheduler.SglangScheduler/GetServerInfo", kRouters},
    {"/sglang.grpc.scheduler.SglangScheduler/GetLoads", kRouters},
    {"/sglang.grpc.scheduler.SglangScheduler/GetTokenizer", kRouters},

    {"/sluice.v1.KvSource/AwaitPrompt", kDecodes},
    {"/sluice.v1.KvSource/Describe", kDecodes},
    {"/sluice.v1.KvSource/Read", kDecodes},
    {"/sluice.v1.KvSource/ReadByLink", kDecodes},
    // A router keeps or gives up prompts that it has not handed over yet.
    {"/sluice.v1.KvSource/Renew", kDecodesOrRouters},
    {"/sluice.v1.KvSource/Release", kDecodesOrRouters},

    // Ranks of one node, which all are decode nodes to others.
    {"/sluice.v1.RankService/Join", kDecodes},
    {"/sluice.v1.RankService/Land", kDecodes},
    {"/sluice.v1.RankService/Claim", kDecodes},

    {"/sluice.v1.Admin/GetModel", kAnybody},
    {"/sluice.v1.Admin/GetCapacity", kWatchers},
    {"/sluice.v1.Admin/ListSequences", kWatchers},
    {"/sluice.v1.Admin/ListFailpoints", kWatchers},
    {"/sluice.v1.Admin/SetFailpoints", kOperators},
    {"/sluice.v1.Admin/Drain", kOperators},
    {"/sluice.v1.Admin/Trace", kOperators},
    {"/sluice.v1.Admin/Resume", kOperators},

    {"/grpc.health.v1.Health/Check", kAnybody},
    {"/grpc.health.v1.Health/Watch", kAnybody},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kOperators},
};

}  // namespace

std::optional<Roles> RolesOf(std::string_view method) {
  const auto* found = std::find_if(std::begin(kRules), std::end(kRules),
                                   [&](const Rule& rule) { return rule.method == method; });
  if (found == std::end(kRules)) return std::nullopt;
  return found->roles;
}

}  // namespace sluice
