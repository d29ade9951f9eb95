// The real engine, scheduler, policy and KV store on a simulated device: what a server makes of its
// configuration, without gRPC and threads.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/engine/drafter.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/request/finish_rate.h"
#include "tests/sim/hash_model.h"
#include "tests/sim/scenario.h"

namespace sluice::sim {

class Node {
 public:
  // Makes the node. Returns the device's errors.
  static absl::StatusOr<std::unique_ptr<Node>> Create(const NodeSpec& spec, SimClock* clock);
  ~Node();

  SimDevice& device() { return *device_; }
  HashModel& model() { return *model_; }
  const AttentionPolicy& policy() const { return *policy_; }
  PagePool& hbm() { return *hbm_; }
  PagePool& dram() { return *dram_; }
  TransferTable& transfers() { return *transfers_; }
  Engine& engine() { return *engine_; }
  const Metrics& metrics() const { return metrics_; }

 private:
  Node() = default;
  absl::Status Build(const NodeSpec& spec, SimClock* clock);

  Metrics metrics_;
  std::unique_ptr<SimDevice> device_;
  std::unique_ptr<HashModel> model_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::unique_ptr<FinishRate> finish_rate_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Drafter> drafter_;  // null: the node does not speculate
  std::unique_ptr<Engine> engine_;
};

}  // namespace sluice::sim
