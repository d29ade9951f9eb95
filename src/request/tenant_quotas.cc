#include "src/request/tenant_quotas.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Time that passed before a token was emitted must not forgive that token, so the passed time is
// counted at least this often while tokens come.
constexpr absl::Duration kForgiveEvery = absl::Milliseconds(100);

}  // namespace

struct TenantQuotas::State {
  struct Tenant {
    uint64_t sequences = 0;
    uint64_t dram_bytes = 0;
    double tokens = 0;  // emitted, less those that time has forgiven
    absl::Time counted;
    bool idle() const { return sequences == 0 && dram_bytes == 0; }
  };

  using Tenants = std::map<std::string, Tenant>;

  TenantQuota QuotaOf(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    auto found = quotas.find(name);
    if (found == quotas.end()) found = quotas.find("*");
    return found == quotas.end() ? TenantQuota() : found->second;
  }
  // Returns the tokens that the tenant has emitted and that time has not forgiven at `now`.
  static double Forgive(Tenant& tenant, const TenantQuota& quota, absl::Time now) {
    const double seconds = absl::ToDoubleSeconds(now - tenant.counted);
    tenant.tokens =
        std::max(0.0, tenant.tokens - seconds * static_cast<double>(quota.tokens_per_second));
    tenant.counted = now;
    return tenant.tokens;
  }
  // Forgets tenants that have nothing, because their names come from outside.
  void Prune() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (tenants.size() < 2 * kept) return;
    const absl::Time now = clock->Now();
    for (auto it = tenants.begin(); it != tenants.end();) {
      const bool gone = it->second.idle() && Forgive(it->second, QuotaOf(it->first), now) <= 0;
      it = gone ? tenants.erase(it) : std::next(it);
    }
    kept = std::max<size_t>(kLeastKept, tenants.size());
  }
  absl::Duration Retry() const { return retry_after ? retry_after() : absl::Seconds(1); }

  static constexpr size_t kLeastKept = 1024;
  Clock* clock = nullptr;
  std::function<absl::Duration()> retry_after;
  absl::Mutex mutex;
  std::map<std::string, TenantQuota> quotas ABSL_GUARDED_BY(mutex);
  Tenants tenants ABSL_GUARDED_BY(mutex);
  size_t kept ABSL_GUARDED_BY(mutex) = kLeastKept;
};

// The engine's sink, which owns the tenant's share of sequences until the end.
class TenantQuotas::MeteredSink : public TokenSink {
 public:
  MeteredSink(std::shared_ptr<State> state, State::Tenants::value_type* tenant,
              std::shared_ptr<TokenSink> sink)
      : state_(std::move(state)), tenant_(tenant), sink_(std::move(sink)) {}
  ~MeteredSink() override { Release(); }  // Submit was refused

  bool HasRoom(size_t count) const override { return sink_->HasRoom(count); }
  void Emit(OutputToken token) override {
    {
      absl::MutexLock lock(&state_->mutex);
      const absl::Time now = state_->clock->Now();
      if (now - tenant_->second.counted >= kForgiveEvery) {
        State::Forgive(tenant_->second, state_->QuotaOf(tenant_->first), now);
      }
      tenant_->second.tokens += 1;
    }
    sink_->Emit(std::move(token));
  }
  void Finish(FinishInfo info) override {
    Release();
    sink_->Finish(std::move(info));
  }

 private:
  void Release() {
    absl::MutexLock lock(&state_->mutex);
    if (std::exchange(released_, true)) return;
    --tenant_->second.sequences;
  }

  const std::shared_ptr<State> state_;
  State::Tenants::value_type* const tenant_;  // not forgotten while it has this sequence
  const std::shared_ptr<TokenSink> sink_;
  bool released_ = false;
};

TenantQuotas::TenantQuotas(Clock* clock, std::function<absl::Duration()> retry_after)
    : state_(std::make_shared<State>()) {
  state_->clock = clock;
  state_->retry_after = std::move(retry_after);
}

void TenantQuotas::Set(const std::map<std::string, TenantQuota>& quotas) {
  absl::MutexLock lock(&state_->mutex);
  state_->quotas = quotas;
}

absl::StatusOr<TenantQuotas::Share> TenantQuotas::TakeDram(const std::string& tenant,
                                                           uint64_t bytes) {
  if (tenant.empty()) return Share();
  const absl::Duration retry = state_->Retry();
  {
    absl::MutexLock lock(&state_->mutex);
    const uint64_t most = state_->QuotaOf(tenant).dram_bytes;
    state_->Prune();
    uint64_t& used = state_->tenants[tenant].dram_bytes;
    if (most > 0 && (bytes > most || used > most - bytes)) {
      return ResourceExhausted(reasons::kTenantDram,
                               absl::StrCat("tenant \"", tenant, "\" has ", used, " of its ", most,
                                            " bytes of DRAM, and this needs ", bytes),
                               retry);
    }
    used += bytes;
  }
  return Given(tenant, bytes);
}

TenantQuotas::Share TenantQuotas::Given(const std::string& tenant, uint64_t bytes) {
  // Nobody looks at the address; it only matters when the share goes.
  return Share(state_.get(), [state = state_, tenant, bytes](const void*) {
    absl::MutexLock lock(&state->mutex);
    state->tenants[tenant].dram_bytes -= bytes;
  });
}

TenantQuotas::Share TenantQuotas::ChargeDram(const std::string& tenant, uint64_t bytes) {
  if (tenant.empty()) return nullptr;
  {
    absl::MutexLock lock(&state_->mutex);
    state_->Prune();
    state_->tenants[tenant].dram_bytes += bytes;
  }
  return Given(tenant, bytes);
}

absl::StatusOr<std::shared_ptr<TokenSink>> TenantQuotas::Admit(const std::string& tenant,
                                                               std::shared_ptr<TokenSink> sink) {
  if (tenant.empty()) return sink;
  const absl::Duration retry = state_->Retry();
  State::Tenants::value_type* admitted = nullptr;
  {
    absl::MutexLock lock(&state_->mutex);
    state_->Prune();
    const TenantQuota quota = state_->QuotaOf(tenant);
    admitted = &*state_->tenants.try_emplace(tenant).first;
    State::Tenant& has = admitted->second;
    if (quota.sequences > 0 && has.sequences >= quota.sequences) {
      return ResourceExhausted(
          reasons::kTenantSequences,
          absl::StrCat("tenant \"", tenant, "\" has its ", quota.sequences, " sequences at once"),
          retry);
    }
    const double most =
        absl::ToDoubleSeconds(kTokenWindow) * static_cast<double>(quota.tokens_per_second);
    const double over = State::Forgive(has, quota, state_->clock->Now()) - most;
    if (quota.tokens_per_second > 0 && over >= 0) {
      return ResourceExhausted(
          reasons::kTenantTokens,
          absl::StrCat("tenant \"", tenant, "\" has had its ", quota.tokens_per_second,
                       " tokens a second"),
          absl::Milliseconds(100) +
              absl::Seconds(over / static_cast<double>(quota.tokens_per_second)));
    }
    ++has.sequences;
  }
  return std::make_shared<MeteredSink>(state_, admitted, std::move(sink));
}

}  // namespace sluice
