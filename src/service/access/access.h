// Decides who may make which call. The default is to deny: a caller has the roles that the access
// file gives to its certificate or token, and a method may be called by the roles that
// access_rules.cc names. The file is read again when it changes. A file that cannot be read changes
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
  // The credentials that a caller shows: identities as in caller.h, and the value of its
  // `authorization` header.
  struct Shown {
    std::vector<std::string> identities;
    std::string authorization;  // "Bearer TOKEN"; empty if there is none
  };

  // Reads the access file. `reload` is the shortest time between two looks at the file.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& path,
                                                      absl::Duration reload);

  // Returns the caller who shows these credentials. A caller that the file does not know gets no
  // roles, and a tenant that does not exist. UNAUTHENTICATED for a token that the file does not
  // know, also beside a known certificate, because a caller who shows a token means to use it.
  absl::StatusOr<Caller> Find(const Shown& shown) const;
  // Returns OK if the caller has one of `roles`. UNAUTHENTICATED: neither certificate nor token
  // says who calls. PERMISSION_DENIED: the caller has none of `roles`. `what` is for the message.
  absl::Status Check(const Shown& shown, const Roles& roles, const std::string& what) const;
  // Makes the same check for a gRPC method. A method that has no rule is denied.
  absl::Status CheckMethod(const Shown& shown, const std::string& method) const;
  Caller CallerOf(const grpc::ServerContextBase& context) const;

  // Calls `take` now and with each new file, on the thread that found the file.
  void OnTenants(std::function<void(const std::map<std::string, TenantQuota>&)> take);
  // Returns whether the file names certificates or tokens.
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

// Returns a processor that asks `access` about every call before anything of the call is read. A
// refused call reaches no interceptor, so the processor itself writes its line into `log`, which is
// null if no log is kept. `access` and `log` outlive the processor.
std::shared_ptr<grpc::AuthMetadataProcessor> NewAccessProcessor(const Access* access,
                                                                AccessLog* log);

}  // namespace sluice
