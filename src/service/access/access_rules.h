// Which roles may make which calls: the one table of it. Pure.
#pragma once

#include <optional>
#include <string_view>

#include "src/service/access/caller.h"

namespace sluice {

// `method` as gRPC has it: "/sluice.v1.Decode/Generate". Nothing for a method that is not in the
// table: nobody may call it.
std::optional<Roles> RolesOf(std::string_view method);

// Who may read /metrics. /healthz and /readyz are for everybody: what asks them, a kubelet, has no
// certificate.
inline constexpr Roles kMetricsRoles{Role::kMonitor, Role::kOperator};

}  // namespace sluice
