// The one place where a Generate, of whatever dialect, becomes a tenant's: whose it is, whether
// what it names is that tenant's own, and whether the tenant may have one more. Thread-safe.
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
  // All of it outlives the gate, and may be null: without TLS, without transfers, without quotas.
  // `file`: whose tenants the quotas are, also of a node without TLS; looked at for a change.
  TenantGate(const Access* access, const Access* file, const TransferTable* transfers,
             TenantQuotas* quotas)
      : access_(access), file_(file), transfers_(transfers), quotas_(quotas) {}

  // Settles request.handoff.tenant, makes request_id the tenant's own and puts a meter before
  // request.sink, which must be set.
  //   PERMISSION_DENIED   the request names another tenant
  //   NOT_FOUND           the transfer is another tenant's, or is not there
  //   RESOURCE_EXHAUSTED  the tenant's quota
  absl::Status Admit(const grpc::ServerContextBase& context, Request* request) const;

  // The name under which the engine knows a caller's request: two tenants may use the same one, and
  // neither reaches the other's.
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
