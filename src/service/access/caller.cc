#include "src/service/access/caller.h"

#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/service/access/access.h"

namespace sluice {
namespace {

constexpr std::array<const char*, kRoles> kNames = {"prefill", "decode", "router", "operator",
                                                    "monitor"};

}  // namespace

std::optional<Role> ParseRole(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Role>(i);
  }
  return std::nullopt;
}

std::string Roles::ToString() const {
  std::string out;
  for (int i = 0; i < kRoles; ++i) {
    if (!Has(static_cast<Role>(i))) continue;
    absl::StrAppend(&out, out.empty() ? "" : ", ", kNames[static_cast<size_t>(i)]);
  }
  return out.empty() ? "none" : out;
}

Caller CallerOf(const Access* access, const grpc::ServerContextBase& context) {
  if (access == nullptr) return Caller{"", "", Roles::All()};
  return access->CallerOf(context);
}

absl::StatusOr<std::string> TenantFor(const Caller& caller, const std::string& named,
                                      const std::string& field) {
  if (caller.tenant.empty() || named.empty() || caller.tenant == named) {
    return caller.tenant.empty() ? named : caller.tenant;
  }
  return WithReason(absl::PermissionDeniedError(
                        absl::StrCat(field, ": ", caller.identity, " may act for tenant \"",
                                     caller.tenant, "\" alone: name that one, or none")),
                    reasons::kOtherTenant);
}

}  // namespace sluice
