// Holds tenants to their quotas. A tenant without a name has none. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/request/tenant_quota.h"
#include "src/request/token_sink.h"

namespace sluice {

class TenantQuotas {
 public:
  // The window of tokens_per_second: a tenant that emitted nothing may emit as many seconds' worth
  // at once.
  static constexpr absl::Duration kTokenWindow = absl::Seconds(10);

  // `retry_after` returns when a refused call may find room again. Null stands for a second.
  explicit TenantQuotas(Clock* clock, std::function<absl::Duration()> retry_after = nullptr);

  // Sets the quotas. "*" is the quota of each tenant that is not named. Tenants keep what they
  // have.
  void Set(const std::map<std::string, TenantQuota>& quotas);

  // A part of a quota, given back when its last owner lets go. It may outlive the TenantQuotas.
  using Share = std::shared_ptr<const void>;
  // Takes bytes of DRAM. RESOURCE_EXHAUSTED, reason TENANT_DRAM, has the time after which to try
  // again.
  absl::StatusOr<Share> TakeDram(const std::string& tenant, uint64_t bytes);
  // Takes bytes whatever the quota says, for caches that are there already.
  Share ChargeDram(const std::string& tenant, uint64_t bytes);
  // Returns `sink` with a sequence's share, which goes back at Finish, and with its tokens counted.
  // RESOURCE_EXHAUSTED has reason TENANT_SEQUENCES or TENANT_TOKENS.
  absl::StatusOr<std::shared_ptr<TokenSink>> Admit(const std::string& tenant,
                                                   std::shared_ptr<TokenSink> sink);

 private:
  struct State;
  class MeteredSink;
  // Returns the share that gives `bytes` back.
  Share Given(const std::string& tenant, uint64_t bytes);

  const std::shared_ptr<State> state_;
};

}  // namespace sluice
