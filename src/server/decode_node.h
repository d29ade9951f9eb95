// sluice-server's objects: from a configuration to a node that decodes, and back down again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/base/clock.h"
#include "src/config/setting.h"
#include "src/device/planning_device.h"
#include "src/engine/drafter.h"
#include "src/engine/engine.h"
#include "src/engine/rank_leader.h"
#include "src/engine/step_recorder.h"
#include "src/facade/decode_load.h"
#include "src/kv/page_pool.h"
#include "src/kv/rank_ledger.h"
#include "src/kv/transfer_table.h"
#include "src/model/token_bytes.h"
#include "src/request/finish_rate.h"
#include "src/request/tenant_quotas.h"
#include "src/server/model_setup.h"
#include "src/server/node.h"
#include "src/server/policy_totals.h"
#include "src/server/signals.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/admin/drain_control.h"
#include "src/service/events/event_publisher.h"
#include "src/service/generate/call_pump.h"
#include "src/service/grpc/channels.h"
#include "src/service/links/link_server.h"
#include "src/service/pull/link_reader.h"
#include "src/service/pull/puller.h"

namespace sluice {

class DecodeNode : public Node {
 public:
  // Returns a node that is ready: the model is loaded, a canary was decoded and the address file is
  // written.
  static absl::StatusOr<std::unique_ptr<DecodeNode>> Start(const Config& config);
  ~DecodeNode() override { ClosePorts(); }
  absl::Status ServeUntil(Signals& signals) override;
  const char* program() const override { return "sluice-server"; }

 private:
  explicit DecodeNode(const Config& config) : Node(config) {}
  void OnSecurity() override;
  absl::Status LoadModelAndMemory() override;
  // Decodes two tokens through the engine.
  absl::Status RunCanary() override;
  absl::StatusOr<std::vector<GrpcService>> MakeServices() override;
  uint64_t MaxMessageBytes() const override;
  void Open() override;
  void UpdateMetrics() override;

  // Puts the policy that auto takes into config_, and logs why.
  absl::Status ChooseAutoPolicy();
  absl::Status ChooseSizes();
  // Waits until the other ranks have loaded, and makes leader_.
  absl::Status MakeLeader();
  // Makes others_ and ledger_.
  absl::Status MakeOthers();
  // Return the pools of all ranks that have sequences of their own, rank 0's first.
  std::vector<const PagePool*> HbmPools() const;
  std::vector<const PagePool*> DramPools() const;
  // Returns the policy that the engine runs, for all ranks where there are several.
  const AttentionPolicy& ServedPolicy() const { return leader_ != nullptr ? *leader_ : *policy_; }
  // Makes transfers_, channels_, links and puller_.
  absl::Status MakeTransfers();
  // Has this rank's device reach the DRAM of the others, where links write too.
  absl::Status PinOtherArenas();
  absl::Status StartEngine();

  // In the order in which they are made; each may use those before it.
  FinishRate finish_rate_{RealClock()};
  TenantQuotas quotas_{RealClock(), [this] { return finish_rate_.RetryAfter(); }};
  std::optional<TokenBytes> token_bytes_;
  std::unique_ptr<PagePool> hbm_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  // These stand for the ranks from 1 on where ranks have sequences of their own.
  std::unique_ptr<PlanningDevice> planning_;
  std::vector<NodeMemory> others_;
  std::unique_ptr<RankLedger> ledger_;          // null: sequences are not of single ranks
  std::unique_ptr<RankLeader> leader_;          // null: the node has one rank
  std::unique_ptr<TotalsCollector> collector_;  // null: the node has one rank
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<EventPublisher> events_;  // null: nothing is published
  std::unique_ptr<Channels> channels_;
  std::vector<Buffer> other_arenas_;        // pinned for links; empty: there are none, or one rank
  std::unique_ptr<LinkServer> push_links_;  // null: kv_transport is grpc
  std::unique_ptr<LinkReader> pull_links_;  // null where push_links_ is
  std::unique_ptr<Puller> puller_;
  std::unique_ptr<StepRecorder> recorder_;  // null: trace_steps is 0
  std::unique_ptr<Drafter> drafter_;        // null: the node does not speculate
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> engine_thread_;
  std::unique_ptr<DrainControl> drain_;
  std::optional<TenantGate> gate_;
  CallPump call_pump_;
  std::unique_ptr<DecodeLoad> load_;
  // All of the above is there, so that the admin port's thread may read it.
  std::atomic<bool> memory_ready_ = false;
};

}  // namespace sluice
