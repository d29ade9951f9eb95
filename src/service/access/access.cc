#include "src/service/access/access.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/server_context.h>

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/logging.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/service/access/access_log.h"
#include "src/service/access/access_rules.h"
#include "src/service/access/tls_files.h"

namespace sluice {
namespace {

constexpr absl::string_view kBearer = "Bearer ";
constexpr size_t kMaxLoggedBytes = 256;

std::string Text(grpc::string_ref text) { return {text.data(), text.size()}; }

void AddIdentities(const grpc::AuthContext& context, std::vector<std::string>* out) {
  constexpr std::pair<const char*, const char*> kProperties[] = {
      {GRPC_X509_CN_PROPERTY_NAME, "cn:"},
      {GRPC_PEER_DNS_PROPERTY_NAME, "dns:"},
      {GRPC_PEER_URI_PROPERTY_NAME, "uri:"},
      {GRPC_PEER_IP_PROPERTY_NAME, "ip:"},
      {GRPC_PEER_EMAIL_PROPERTY_NAME, "email:"}};
  for (const auto& [property, kind] : kProperties) {
    for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
      out->push_back(absl::StrCat(kind, Text(value)));
    }
  }
}

// Returns a caller without roles. It is confined to a tenant that nobody can be, because an empty
// tenant would stand for all of them.
Caller Nobody() { return Caller{"", "/", Roles()}; }

template <typename Metadata>
std::string AuthorizationOf(const Metadata& metadata) {
  const auto found = metadata.find("authorization");
  return found == metadata.end() ? "" : Text(found->second);
}

class AccessProcessor : public grpc::AuthMetadataProcessor {
 public:
  AccessProcessor(const Access* access, AccessLog* log) : access_(access), log_(log) {}

  // The lookup is in memory, apart from a `stat` now and then.
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) override {
    Access::Shown shown;
    AddIdentities(*context, &shown.identities);
    shown.authorization = AuthorizationOf(metadata);
    const auto path = metadata.find(":path");
    const std::string method = path == metadata.end() ? "" : Text(path->second);
    const absl::Status status = access_->CheckMethod(shown, method);
    if (!status.ok() && log_ != nullptr && AccessLog::Keeps(method)) {
      WriteRefusal(shown, method, status);
    }
    return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                        std::string(status.message()));
  }

 private:
  // gRPC tells no peer here. A certificate that the access file does not name is shown by the first
  // of its names, since an authority that this node trusts has vouched for it.
  void WriteRefusal(const Access::Shown& shown, const std::string& method,
                    const absl::Status& status) const {
    const Caller caller = access_->Find(shown).value_or(Nobody());
    CallFields call;
    // A stranger may call a method by a name as long as metadata may be.
    call.method = method.substr(0, kMaxLoggedBytes);
    call.identity = caller.identity;
    if (!caller.identity.empty()) {
      call.tenant = caller.tenant;
    } else if (!shown.identities.empty()) {
      call.identity = shown.identities.front().substr(0, kMaxLoggedBytes);
    }
    call.status = absl::StatusCodeToString(status.code());
    call.begin = absl::Now();
    log_->Write(std::move(call));
  }

  const Access* const access_;
  AccessLog* const log_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Access>> Access::Open(const std::string& path,
                                                     absl::Duration reload) {
  SLUICE_ASSIGN_OR_RETURN(AccessRules rules, ReadAccessFile(path));
  return std::unique_ptr<Access>(new Access(path, reload, std::move(rules)));
}

Access::Access(std::string path, absl::Duration reload, AccessRules rules)
    : path_(std::move(path)),
      reload_(reload),
      rules_(std::make_shared<const AccessRules>(std::move(rules))),
      version_(FileVersion(path_)),
      next_look_(absl::Now() + reload_) {}

std::shared_ptr<const AccessRules> Access::rules() const {
  Refresh();
  absl::MutexLock lock(&mutex_);
  return rules_;
}

void Access::Refresh() const {
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = absl::Now();
    if (now < next_look_) return;
    next_look_ = now + reload_;  // so that one thread looks
  }
  // A change made while the file is read is seen the next time, because the version is older than
  // the text.
  const std::string version = FileVersion(path_);
  {
    absl::MutexLock lock(&mutex_);
    if (version == version_) return;
    version_ = version;
  }
  absl::StatusOr<AccessRules> read = ReadAccessFile(path_);
  if (!read.ok()) {
    Log(LogLevel::kError, "the access file cannot be used: the rules before it stay",
        {{"error", std::string(read.status().message())}});
    return;
  }
  Log(LogLevel::kInfo, "the access file was read again", {{"path", path_}});
  const auto rules = std::make_shared<const AccessRules>(*std::move(read));
  absl::MutexLock lock(&mutex_);
  rules_ = rules;
  if (take_) take_(rules->tenants);
}

void Access::OnTenants(std::function<void(const std::map<std::string, TenantQuota>&)> take) {
  absl::MutexLock lock(&mutex_);
  take_ = std::move(take);
  take_(rules_->tenants);
}

bool Access::KnowsCallers() const {
  const std::shared_ptr<const AccessRules> rules = this->rules();
  return !rules->certificates.empty() || !rules->tokens.empty();
}

absl::StatusOr<Caller> Access::Find(const Shown& shown) const {
  const std::shared_ptr<const AccessRules> rules = this->rules();
  if (!shown.authorization.empty()) {
    const absl::string_view value = shown.authorization;
    if (absl::StartsWithIgnoreCase(value, kBearer)) {
      const auto found = rules->tokens.find(Sha256Hex(shown.authorization.substr(kBearer.size())));
      if (found != rules->tokens.end()) return found->second;
    }
    return absl::UnauthenticatedError(
        "authorization: the token is not known here, or is not written as Bearer TOKEN");
  }
  Caller out = Nobody();
  bool confined = false;
  for (const AccessRules::Certificate& rule : rules->certificates) {
    for (const std::string& identity : shown.identities) {
      if (!MatchesPattern(rule.pattern, identity)) continue;
      // The first entry says whose tenant the caller acts for; the others add roles for that tenant
      // alone.
      if (!confined) {
        out.identity = identity;
        out.tenant = rule.caller.tenant;
        confined = true;
      }
      if (rule.caller.tenant != out.tenant) continue;
      for (int i = 0; i < kRoles; ++i) {
        if (rule.caller.roles.Has(static_cast<Role>(i))) out.roles.Add(static_cast<Role>(i));
      }
    }
  }
  return out;
}

absl::Status Access::Check(const Shown& shown, const Roles& roles, const std::string& what) const {
  SLUICE_ASSIGN_OR_RETURN(const Caller caller, Find(shown));
  if (caller.roles.Intersects(roles)) return absl::OkStatus();
  if (shown.identities.empty() && shown.authorization.empty()) {
    return absl::UnauthenticatedError(
        absl::StrCat(what, " needs a client certificate or a token (authorization: Bearer TOKEN)"));
  }
  const std::string who = caller.identity.empty()
                              ? absl::StrCat("nobody that the access file knows (",
                                             absl::StrJoin(shown.identities, ", "), ")")
                              : caller.identity;
  return absl::PermissionDeniedError(absl::StrCat(what, " needs one of the roles ",
                                                  roles.ToString(), "; ", who, " has ",
                                                  caller.roles.ToString()));
}

absl::Status Access::CheckMethod(const Shown& shown, const std::string& method) const {
  const std::optional<Roles> roles = RolesOf(method);
  if (roles.has_value()) return Check(shown, *roles, method);
  // A known caller may learn that there is no such method, as a router needs that asks for dialects
  // in turn: the call then ends with UNIMPLEMENTED. A method that is served is checked by its rule.
  SLUICE_RETURN_IF_ERROR(Check(shown, Roles::All(), method));
  return absl::UnimplementedError(absl::StrCat("unknown method ", method));
}

Caller Access::CallerOf(const grpc::ServerContextBase& context) const {
  Shown shown;
  if (const auto auth = context.auth_context(); auth != nullptr) {
    AddIdentities(*auth, &shown.identities);
  }
  shown.authorization = AuthorizationOf(context.client_metadata());
  // If this is not OK, the file has changed since the call was let in, and the call goes on without
  // any role.
  return Find(shown).value_or(Nobody());
}

std::shared_ptr<grpc::AuthMetadataProcessor> NewAccessProcessor(const Access* access,
                                                                AccessLog* log) {
  return std::make_shared<AccessProcessor>(access, log);
}

}  // namespace sluice
