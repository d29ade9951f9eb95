// The only place where a Generate, in whatever dialect, is given to a tenant. It decides whose
// request it is, whether what the request names belongs to that tenant, and whether the tenant may
// have one more. Thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "src/request/request.h"
#include "src/request/tenant_quotas.h"
#include "src/service/access/caller.h"

namespace sluice {

class TransferTable;

class TenantGate {
 public:
  // All arguments outlive the gate, and each may be null: `access` without TLS, `transfers` on a
  // node without transfers, `quotas` without quotas. `file` has the tenants that the quotas are
  // for, also on a node without TLS; the gate looks whether it has changed.
  TenantGate(const Access* access, const Access* file, const TransferTable* transfers,
             TenantQuotas* quotas)
      : access_(access), file_(file), transfers_(transfers), quotas_(quotas) {}

  // Sets request.handoff.tenant, puts the tenant's name before request_id, and puts a meter before
  // request.sink, which must be set.
  //   PERMISSION_DENIED   the request names another tenant
  //   NOT_FOUND           the transfer belongs to another tenant, or is not there
  //   RESOURCE_EXHAUSTED  the tenant's quota is used up
  absl::Status Admit(const grpc::ServerContextBase& context, Request* request) const;

  // Returns the name under which the engine knows a caller's request. Two tenants may use the same
  // name, and neither reaches the other's request.
  std::string RequestId(const grpc::ServerContextBase& context, const std::string& name) const;

  Caller CallerOf(const grpc::ServerContextBase& context) const {
    return sluice::CallerOf(access_, context);
  }

 private:
  const Access* const access_;
  const Access* const file_;
  const TransferTable* const transfers_;
  TenantQuotas* const quotas_;
};

}  // namespace sluice
