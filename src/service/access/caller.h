// Says who makes a call and for which tenant. Services ask once the call has been let in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace grpc {
class ServerContextBase;
}

namespace sluice {

class Access;

// The roles of callers. src/service/access/access_rules.cc says which calls each role may make.
enum class Role : uint8_t { kPrefill, kDecode, kRouter, kOperator, kMonitor };
inline constexpr int kRoles = 5;
std::optional<Role> ParseRole(std::string_view name);

// A set of roles.
class Roles {
 public:
  static Roles All() { return Roles((1u << kRoles) - 1); }
  Roles() = default;
  template <typename... More>
  explicit constexpr Roles(Role first, More... more)
      : bits_(((1u << static_cast<int>(first)) | ... | (1u << static_cast<int>(more)))) {}
  bool empty() const { return bits_ == 0; }
  void Add(Role role) { bits_ |= 1u << static_cast<int>(role); }
  bool Has(Role role) const { return (bits_ >> static_cast<int>(role) & 1) != 0; }
  bool Intersects(const Roles& other) const { return (bits_ & other.bits_) != 0; }
  // Returns for example "prefill, router", or "none".
  std::string ToString() const;

 private:
  explicit constexpr Roles(uint32_t bits) : bits_(bits) {}
  uint32_t bits_ = 0;
};

struct Caller {
  // The part of the certificate, or the name of the token, by which the caller was known:
  // "cn:prefill-0", "dns:router.svc", "uri:spiffe://cluster/prefill", "token:alice". Empty if
  // nobody was asked.
  std::string identity;
  // The only tenant that the caller may act for. Empty if it may name any.
  std::string tenant;
  Roles roles;
};

// Returns the caller of a call that was let in. `access` is null on a node without TLS, where every
// caller has every role and may name any tenant. Cheap; any thread.
Caller CallerOf(const Access* access, const grpc::ServerContextBase& context);

// Returns the tenant that a call is for. `named` is what the call has in `field`, and empty if it
// names none. PERMISSION_DENIED, reason OTHER_TENANT, if the caller may not act for that tenant.
absl::StatusOr<std::string> TenantFor(const Caller& caller, const std::string& named,
                                      const std::string& field = "tenant");

}  // namespace sluice
