#include "src/server/follower_port.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/server/decode_metrics.h"
#include "src/server/ranks.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<FollowerPort>> FollowerPort::Open(const Config& config,
                                                                 const Parts& parts) {
  std::unique_ptr<FollowerPort> port(new FollowerPort(parts));
  if (config.admin_listen().empty()) return port;
  const absl::StatusOr<std::string> address = AddressOfRank(config, config.admin_listen());
  if (!address.ok()) return WithMessagePrefix(address.status(), "admin_listen");
  port->metrics_.SetBuildInfo({Version(), parts.model->config().name, parts.device->name(),
                               parts.device->kernels().name(), parts.memory->policy->name()});
  AdminHttp::Options options;
  options.listen = *address;
  options.tls = parts.security->tls;
  options.access = parts.security->access();
  options.metrics = [own = port.get()] { return own->Render(); };
  options.ready = [parts] { return parts.ranks->status().ok() && parts.device->Health().ok(); };
  absl::StatusOr<std::unique_ptr<AdminHttp>> started = AdminHttp::Start(std::move(options));
  if (!started.ok()) return WithMessagePrefix(started.status(), "admin_listen");
  port->http_ = *std::move(started);
  return port;
}

std::string FollowerPort::Render() {
  UpdatePoolMetrics({parts_.memory->dram.get()}, metrics_);
  metrics_.kv_usage.Set(UpdatePoolMetrics({parts_.memory->hbm.get()}, metrics_));
  const PolicyTotals totals = TotalsOf(*parts_.memory->policy, *parts_.memory->hbm);
  SetPolicyMetrics(totals, metrics_);
  SetRankMetrics(parts_.ranks->rank(), totals, metrics_);
  metrics_.rank.Set(parts_.ranks->rank());
  metrics_.ranks_alive.Set(parts_.ranks->alive());
  process_.Update(metrics_);
  return metrics_.Render();
}

}  // namespace sluice
