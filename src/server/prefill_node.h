// sluice-prefill's objects: a prefill node for demos, tests and small clusters.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/prefiller.h"
#include "src/prefill/rooms.h"
#include "src/server/node.h"
#include "src/server/signals.h"
#include "src/service/access/tenant_gate.h"
#include "src/service/generate/call_pump.h"
#include "src/service/grpc/channels.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"
#include "src/service/prefill/holding_generator.h"
#include "src/service/prefill/prompt_counts.h"

namespace sluice {

class PrefillNode : public Node {
 public:
  // Returns a node that is ready: the model is loaded, a token was computed and the address file is
  // written.
  static absl::StatusOr<std::unique_ptr<PrefillNode>> Start(const Config& config);
  ~PrefillNode() override { ClosePorts(); }
  // After `signals` says stop, running prompts get kGrace to finish.
  absl::Status ServeUntil(Signals& signals) override;
  const char* program() const override { return "sluice-prefill"; }

 private:
  explicit PrefillNode(const Config& config) : Node(config) {}
  absl::Status LoadModelAndMemory() override;
  absl::Status RunCanary() override;
  absl::StatusOr<std::vector<GrpcService>> MakeServices() override;
  uint64_t MaxMessageBytes() const override;
  void Open() override;

  absl::Status ChooseSizes();
  // Adds the services through which gateways and decode nodes reach the prompts that are held.
  absl::Status AddHoldingServices(std::vector<GrpcService>* services);
  // Returns the address at which decode nodes reach this node.
  std::string Address() const;

  // In the order in which they are made; each may use those before it.
  std::unique_ptr<Channels> channels_;
  std::unique_ptr<Prefiller> prefiller_;
  std::unique_ptr<HeldPrompts> held_;       // null: hold_bytes is 0
  std::unique_ptr<LinkPeers> push_links_;   // null: kv_transport is grpc
  std::unique_ptr<LinkServer> pull_links_;  // null where held_ or push_links_ is
  PromptCounts counts_{&metrics_};
  std::unique_ptr<HoldingGenerator> holding_;  // null where held_ is
  std::optional<TenantGate> gate_;             // for the gateway's calls; empty where held_ is null
  CallPump call_pump_;
};

}  // namespace sluice
