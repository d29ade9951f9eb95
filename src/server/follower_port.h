// FollowerPort is the admin port of a rank other than 0: /metrics of its own process and memory,
// /healthz and /readyz.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "src/metrics/metrics.h"
#include "src/metrics/process_metrics.h"
#include "src/server/model_setup.h"
#include "src/server/security.h"
#include "src/service/admin/admin_http.h"

namespace sluice {

class FollowerPort {
 public:
  // All outlive the port.
  struct Parts {
    Device* device = nullptr;
    const Model* model = nullptr;
    const NodeMemory* memory = nullptr;
    const RankGroup* ranks = nullptr;
    const Security* security = nullptr;
  };
  // Opens the port of admin_listen (AddressOfRank). Without admin_listen there is none. The error
  // names the setting.
  static absl::StatusOr<std::unique_ptr<FollowerPort>> Open(const Config& config,
                                                            const Parts& parts);

  // Returns the address, or "".
  std::string address() const { return http_ == nullptr ? "" : http_->address(); }

 private:
  explicit FollowerPort(const Parts& parts) : parts_(parts) {}
  std::string Render();

  const Parts parts_;
  Metrics metrics_;
  ProcessMetrics process_;
  std::unique_ptr<AdminHttp> http_;
};

}  // namespace sluice
