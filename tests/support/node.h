// A decode node without its services, for tests: a device, model, pools, policy, transfer table and
// engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"
#include "src/device/planning_device.h"
#include "src/device/shared_arenas.h"
#include "src/engine/drafter.h"
#include "src/engine/engine.h"
#include "src/engine/rank_leader.h"
#include "src/kv/page_pool.h"
#include "src/kv/rank_ledger.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/model/token_bytes.h"
#include "src/request/token_sink.h"

namespace sluice::testing {

struct NodeOptions {
  std::string model_dir;
  std::string load_format = "auto";
  std::string kernels = "auto";
  int threads = 1;
  int row_bucket = 0;  // CpuDeviceOptions::row_bucket
  DType kv_dtype = DType::kBFloat16;
  int block_tokens = 32;
  int max_context = 0;
  int max_sequences = 16;
  int chunk_tokens = 64;
  int64_t hbm_bytes = int64_t{64} << 20;
  int64_t dram_bytes = int64_t{64} << 20;
  double overcommit = 1;
  PolicyOptions policy;  // its name and settings; device, pools and shapes are filled in
  // Makes a policy that watches the given one, which the engine then gets in its place. Null: the
  // engine gets the policy itself.
  std::function<std::unique_ptr<AttentionPolicy>(AttentionPolicy*)> watch;
  LocalPrefill local_prefill = LocalPrefill::kAlways;
  bool prefix_cache = true;
  bool run_engine = true;  // false: the test calls Turn() itself
  absl::Duration max_lease = absl::Seconds(60);
  absl::Duration transfer_wait = absl::Seconds(60);
  absl::Duration slow_reader_timeout = absl::Seconds(30);
  uint32_t max_waiting = 1024;
  // Drafts up to draft_tokens tokens of a sequence in a step, and outlives the node; null: there
  // are no drafts.
  Drafter* drafter = nullptr;
  int draft_tokens = 0;
  Clock* clock = RealClock();
  // Not null: the node is rank 0 of this group, whose other ranks follow it (Follow).
  const RankGroupOptions* ranks = nullptr;
  int halves_from = 0;          // BatchState::Options::halves_from
  bool divide_experts = false;  // the ranks divide the experts, and each has its own sequences
};

// The output of a sequence.
struct Generated {
  std::vector<int32_t> ids;
  std::vector<OutputToken> tokens;
  FinishInfo finish;
};

// The pools of a rank, and the policy that uses them.
struct NodeParts {
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<AttentionPolicy> policy;
};

class Node {
 public:
  // Fails the test if the node cannot be made.
  explicit Node(const NodeOptions& options);
  ~Node();

  Device& device() { return *device_; }
  Model& model() { return *model_; }
  PagePool& hbm() { return *hbm_; }
  PagePool& dram() { return *dram_; }
  AttentionPolicy& policy() { return *policy_; }
  TransferTable& transfers() { return *transfers_; }
  Metrics& metrics() { return metrics_; }
  Engine& engine() { return *engine_; }

  // Returns a manifest for this model.
  Manifest MakeManifest(const std::vector<int32_t>& prompt, uint32_t context_length,
                        uint32_t max_new_tokens) const;
  // Pushes bf16 caches [tokens][kv_heads][head_dim] per layer as KvIngest would, converted to this
  // node's element type, and commits them with `first_tokens`. Returns the transfer id.
  std::string Push(const std::vector<int32_t>& prompt, uint32_t context_length,
                   uint32_t max_new_tokens, const std::vector<std::vector<uint16_t>>& k,
                   const std::vector<std::vector<uint16_t>>& v,
                   std::vector<OutputToken> first_tokens = {});
  // Returns the payload of one layer's chunk: tokens [begin, end) of all heads.
  std::vector<uint8_t> ChunkPayload(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                                    uint32_t begin, uint32_t end) const;
  // Lands one chunk.
  absl::StatusOr<uint64_t> Land(const ChunkHeader& header, const std::vector<uint8_t>& payload);

  // Submits a request and waits for its end.
  Generated Generate(Request request);
  // Submits a request. The caller reads the stream.
  std::shared_ptr<TokenStream> Start(Request request, size_t capacity = 4096);
  static Generated Collect(TokenStream& stream);
  // Waits until the engine has nothing to do. Returns whether nothing is reserved or used then, on
  // any rank.
  bool Quiescent();
  // With divide_experts: what counts the ranks' sequences, and the pool of another rank's DRAM.
  RankLedger& ledger() { return *ledger_; }
  PagePool& dram_of(int rank) { return *others_.at(static_cast<size_t>(rank) - 1).dram; }

 private:
  Metrics metrics_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<RankChannel> channel_;  // with ranks
  std::unique_ptr<RankGroup> ranks_;
  std::unique_ptr<SharedArenas> arenas_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::unique_ptr<AttentionPolicy> watch_;    // null, or watches policy_
  std::unique_ptr<PlanningDevice> planning_;  // with divide_experts, as the next three
  std::vector<NodeParts> others_;             // what stands for the ranks from 1 on
  std::unique_ptr<RankRows> rows_;
  std::unique_ptr<RankLedger> ledger_;
  std::unique_ptr<RankLeader> leader_;  // with ranks
  std::unique_ptr<TransferTable> transfers_;
  std::optional<TokenBytes> token_bytes_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
  int next_request_ = 0;
};

// Runs another rank of a node of these options until the node ends, and returns how it ended. It
// uses no assertions, so that any thread may run it.
absl::Status Follow(const NodeOptions& options, const RankGroupOptions& rank);

// Runs `work` on a node of `size` ranks, whose others are threads, and checks how those end.
void OnRanks(NodeOptions options, int size, const std::function<void(Node&)>& work);

// Returns a greedy request for `max_tokens` tokens that ignores EOS.
Request GreedyRequest(std::vector<int32_t> prompt, uint32_t max_tokens);

}  // namespace sluice::testing
