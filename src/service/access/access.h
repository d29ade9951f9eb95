// Decides who may make which call. Deny by default: a caller has the roles that the access file
// gives to its certificate or its token, and a method may be called by the roles that
// access_rules.cc names. The file is read again when it changes; one that cannot be read changes
// nothing and is logged once. Thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/service/access/access_file.h"
#include "src/service/access/caller.h"

namespace grpc {
class AuthMetadataProcessor;
}

namespace sluice {

class AccessLog;

class Access {
 public:
  // What a caller shows: identities as in caller.h, and the value of its `authorization` header.
  struct Shown {
    std::vector<std::string> identities;
    std::string authorization;  // "Bearer TOKEN"; empty: none
  };

  // `reload`: how often the file is looked at, at most.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& path,
                                                      absl::Duration reload);

  // Who shows this; without roles, and of no tenant that there is, if nobody that the file knows.
  // UNAUTHENTICATED for a token that it does not know, also beside a certificate that it does: who
  // shows one means to use it.
  absl::StatusOr<Caller> Find(const Shown& shown) const;
  // UNAUTHENTICATED: neither certificate nor token says who calls. PERMISSION_DENIED: the caller
  // has none of `roles`. `what` is for the message.
  absl::Status Check(const Shown& shown, const Roles& roles, const std::string& what) const;
  // The same for a gRPC method; one that has no rule is denied.
  absl::Status CheckMethod(const Shown& shown, const std::string& method) const;
  Caller CallerOf(const grpc::ServerContextBase& context) const;

  // Called now and with each new file, on the thread that found it.
  void OnTenants(std::function<void(const std::map<std::string, TenantQuota>&)> take);
  // Whether the file names certificates or tokens.
  bool KnowsCallers() const;
  // Looks whether the file has changed, if it is time to.
  void Refresh() const;

 private:
  Access(std::string path, absl::Duration reload, AccessRules rules);
  std::shared_ptr<const AccessRules> rules() const;

  const std::string path_;
  const absl::Duration reload_;
  mutable absl::Mutex mutex_;
  mutable std::shared_ptr<const AccessRules> rules_ ABSL_GUARDED_BY(mutex_);
  mutable std::string version_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Time next_look_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const std::map<std::string, TenantQuota>&)> take_ ABSL_GUARDED_BY(mutex_);
};

// Asks `access`, which outlives it, for every call before anything of the call is read. A call that
// it refuses reaches no interceptor, so it writes the line of that call itself into `log` (null:
// none is kept), which outlives it too.
std::shared_ptr<grpc::AuthMetadataProcessor> NewAccessProcessor(const Access* access,
                                                                AccessLog* log);

}  // namespace sluice
