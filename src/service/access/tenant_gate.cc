#include "src/service/access/tenant_gate.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"
#include "src/service/access/access.h"

namespace sluice {
namespace {

// Tenants of an access file have no slash in their names.
std::string Scoped(const Caller& caller, const std::string& name) {
  return caller.tenant.empty() ? name : absl::StrCat(caller.tenant, "/", name);
}

}  // namespace

absl::Status TenantGate::Admit(const grpc::ServerContextBase& context, Request* request) const {
  if (file_ != nullptr) file_->Refresh();
  const Caller caller = CallerOf(context);
  HandoffRef& handoff = request->handoff;
  SLUICE_ASSIGN_OR_RETURN(handoff.tenant, TenantFor(caller, handoff.tenant));
  request->request_id = Scoped(caller, request->request_id);
  std::string tenant = handoff.tenant;
  if (transfers_ != nullptr && !handoff.transfer_id.empty()) {
    if (!caller.tenant.empty()) {
      SLUICE_RETURN_IF_ERROR(transfers_->CheckOwner(handoff.transfer_id, caller.tenant));
    }
    // A caller that acts for all tenants need not say whose transfer it names.
    if (tenant.empty()) tenant = transfers_->TenantOf(handoff.transfer_id).value_or("");
  }
  if (quotas_ == nullptr) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(request->sink, quotas_->Admit(tenant, std::move(request->sink)));
  return absl::OkStatus();
}

std::string TenantGate::RequestId(const grpc::ServerContextBase& context,
                                  const std::string& name) const {
  return Scoped(CallerOf(context), name);
}

}  // namespace sluice
