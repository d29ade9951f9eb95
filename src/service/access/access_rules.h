// Says which roles may make which calls; this is the only table of them. Pure functions.
#pragma once

#include <optional>
#include <string_view>

#include "src/service/access/caller.h"

namespace sluice {

// Returns the roles that may call `method`, which is written as gRPC has it:
// "/sluice.v1.Decode/Generate". Returns nothing for a method that is not in the table, which nobody
// may call.
std::optional<Roles> RolesOf(std::string_view method);

// The roles that may read /metrics. /healthz and /readyz are for everybody, because a kubelet,
// which asks them, has no certificate.
inline constexpr Roles kMetricsRoles{Role::kMonitor, Role::kOperator};

}  // namespace sluice
