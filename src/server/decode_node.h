// sluice-server's objects, from a configuration to a node that decodes, and back down again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/base/clock.h"
#include "src/base/readiness.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/engine/engine.h"
#include "src/engine/step_recorder.h"
#include "src/facade/decode_load.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/metrics/process_metrics.h"
#include "src/model/model.h"
#include "src/model/token_bytes.h"
#include "src/request/finish_rate.h"
#include "src/request/tenant_quotas.h"
#include "src/server/security.h"
#include "src/server/signals.h"
#include "src/service/access/access_log.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/admin/admin_http.h"
#include "src/service/admin/drain_control.h"
#include "src/service/generate/call_pump.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/pull/puller.h"

namespace sluice {

class DecodeNode {
 public:
  // Everything up to ready: the model loaded, a canary decoded, the address file written.
  static absl::StatusOr<std::unique_ptr<DecodeNode>> Start(const Config& config);
  // Serves until `signals` says stop, lets what runs finish in the configured time, and stops. An
  // error: the device failed; every sequence has ended with it.
  absl::Status ServeUntil(Signals& signals);

 private:
  explicit DecodeNode(const Config& config) : config_(config) {}
  absl::Status StartAdminHttp();
  absl::Status LoadModelAndMemory();
  absl::Status StartEngine();
  // Decodes two tokens through the engine: everything between a prompt and its tokens works.
  absl::Status DecodeCanary();
  absl::Status StartGrpc();
  absl::Status EndFailed();
  std::string RenderMetrics();

  const Config config_;
  // In order of making; each may use those before it.
  Security security_;
  Metrics metrics_;
  ProcessMetrics process_metrics_;
  Readiness readiness_;
  FinishRate finish_rate_{RealClock()};
  TenantQuotas quotas_{RealClock(), [this] { return finish_rate_.RetryAfter(); }};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::optional<TokenBytes> token_bytes_;
  std::unique_ptr<PagePool> hbm_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Channels> channels_;
  std::unique_ptr<Puller> puller_;
  std::unique_ptr<StepRecorder> recorder_;  // null: trace_steps is 0
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> engine_thread_;
  std::unique_ptr<DrainControl> drain_;
  std::optional<TenantGate> gate_;
  CallPump call_pump_;
  std::unique_ptr<DecodeLoad> load_;
  std::unique_ptr<AccessLog> access_log_;  // null: none is kept
  std::unique_ptr<GrpcServer> grpc_;
  std::atomic<GrpcServer*> counted_ = nullptr;  // grpc_, once it is there
  // Its callbacks ask the pools: see memory_ready_.
  std::atomic<bool> memory_ready_ = false;
  std::unique_ptr<AdminHttp> admin_http_;
};

}  // namespace sluice
