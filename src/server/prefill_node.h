// sluice-prefill's objects: a prefill node for demos, tests and small clusters.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "src/base/readiness.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/metrics/metrics.h"
#include "src/metrics/process_metrics.h"
#include "src/model/model.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/prefiller.h"
#include "src/server/security.h"
#include "src/server/signals.h"
#include "src/service/access/access_log.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/admin/admin_http.h"
#include "src/service/generate/call_pump.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/prefill/holding_generator.h"
#include "src/service/prefill/prompt_counts.h"

namespace sluice {

class PrefillNode {
 public:
  // Everything up to ready: the model loaded, a token computed, the address file written.
  static absl::StatusOr<std::unique_ptr<PrefillNode>> Start(const Config& config);
  // Serves until `signals` says stop; prompts that run get kGrace to finish. An error: the device
  // failed.
  absl::Status ServeUntil(Signals& signals);

 private:
  explicit PrefillNode(const Config& config) : config_(config) {}
  absl::Status StartAdminHttp();
  absl::Status LoadModelAndMemory();
  absl::Status ComputeCanary();
  absl::Status StartGrpc();

  const Config config_;
  // In order of making; each may use those before it.
  Security security_;
  std::unique_ptr<Channels> channels_;
  Readiness readiness_;
  Metrics metrics_;
  ProcessMetrics process_metrics_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Prefiller> prefiller_;
  std::unique_ptr<HeldPrompts> held_;      // null: hold_bytes is 0
  std::unique_ptr<AccessLog> access_log_;  // null: none is kept
  PromptCounts counts_{&metrics_};
  std::unique_ptr<HoldingGenerator> holding_;  // null as held_ is
  std::optional<TenantGate> gate_;             // of the façade; empty as held_ is
  CallPump call_pump_;
  std::unique_ptr<GrpcServer> grpc_;
  std::atomic<GrpcServer*> counted_ = nullptr;  // grpc_, once it is there
  std::unique_ptr<AdminHttp> admin_http_;       // its callbacks ask that
};

}  // namespace sluice
