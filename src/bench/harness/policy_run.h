// One policy over a model, under the caps that every policy of a comparison has: how many sequences
// it admits, and how the real engine decodes them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/bench/harness/step_floor.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/report/timing.h"
#include "src/bench/workload/context.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice::bench {

// What all policies share, one after the other: a tier of 110 GiB takes long to allocate.
// Everything outlives the runs.
struct PolicyWorld {
  Device* device = nullptr;
  Model* model = nullptr;
  PagePool* hbm = nullptr;   // the cap for caches, digests and tables
  PagePool* dram = nullptr;  // for homes
  int max_context = 0;
  int slots = 1;
  PolicyOptions options;  // device, pools, slots and sizes are filled in for each policy
};

// Both tiers' memory, which is cut anew for each policy: to pin 100 GiB takes half a minute.
class BenchTiers {
 public:
  // RESOURCE_EXHAUSTED names the tier.
  static absl::StatusOr<std::unique_ptr<BenchTiers>> Create(Device& device, int64_t hbm_bytes,
                                                            int64_t dram_bytes);
  // Pools as the policy of that name wants them, in world->hbm and world->dram; those of before
  // end. REQUIRES: nobody has anything of them.
  absl::Status Cut(PolicyWorld* world, const std::string& name);

 private:
  BenchTiers(Buffer hbm, Buffer dram);

  const Buffer hbm_memory_, dram_memory_;
  std::unique_ptr<PagePool> hbm_, dram_;
};

// What the policy of that name is made with.
PolicyOptions OptionsOf(const PolicyWorld& world, const std::string& name);

// REQUIRES: no other policy has anything of the pools. The policy's errors, with its name.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> SetUpPolicy(const PolicyWorld& world,
                                                             const std::string& name);

// Sequences of `context` tokens, and `total` at their end, that the policy admits together, at most
// its slots; and what keeps it from one more: "HBM", "DRAM" or "slots".
struct Admission {
  int batch = 0;
  std::string bound;
  Footprint each;
  int64_t hbm_bytes_each = 0, dram_bytes_each = 0;
};
Admission LargestBatch(const PolicyWorld& world, AttentionPolicy& policy, int64_t context,
                       int64_t total);

// What a run of one policy comes to.
struct PolicyRun {
  std::string policy;
  int batch = 0;
  int context = 0;
  bool largest = false;  // batch that the policy admits
  Admission admission;
  float beta = 0;       // of policy hgca
  Timing step;          // seconds, of windows
  double tpot_p50 = 0;  // seconds between tokens of one sequence
  double tpot_p99 = 0;
  double idle_share = 0;  // of a traced run: time in which no kernel of the model ran
  // Of the windows alone: not what the first steps bring.
  PolicyStatistics statistics;
  WorkerStatistics workers;
  StepTraffic step_bytes;  // that a step must move
  int64_t budget_tokens = 0;
  int kv_heads = 0;
  bool latent = false;  // of a model with latent caches

  // Of latent caches: of each sequence's first kFirstSteps steps, and of the last windows.
  PolicyStatistics first, steady;

  double tokens_per_second() const { return batch / step.median; }
  // Means over the layers that select; 0 and 1 where none does.
  double CpuShare() const;
  double HitRate() const;
  double RecallInterval() const;  // decode rows for each one with a recall; 0: there was none
  double LinkBytesPerStep() const;
  double CpuTokens() const;  // of a row and KV head that the CPU attended to, or the link brought
};

// Entries of latent caches that a sequence misses in a step, by layer; and over the layers.
std::vector<double> MissesByLayer(const PolicyStatistics& statistics);
struct LayerSpread {
  double mean = 0, least = 0, most = 0;
};
LayerSpread SpreadOfLayers(const std::vector<double>& layers);
// ESS, section 3.2, on a pool's first steps.
inline constexpr int kFirstSteps = 16;

// Decodes `batch` of the contexts, handed over in turn, in windows of `steps`; then, if `trace` is
// not null, once more under the trace.
absl::StatusOr<PolicyRun> RunPolicy(const PolicyWorld& world, const std::string& name,
                                    const std::vector<Context>& contexts, int batch, int steps,
                                    StepTrace* trace);
// Tokens that RunPolicy needs beyond the context.
int PolicyRunTokens(int steps);

// A beta of policy hgca with which the CPU attends to `tokens` tokens on average, for each row and
// KV head, and what it found: by halving, a short run of one sequence each.
struct MeanSelection {
  float beta = 0;
  double tokens = 0;
};
absl::StatusOr<MeanSelection> FindMeanSelection(const PolicyWorld& world, const std::string& name,
                                                const std::vector<Context>& contexts,
                                                double tokens);

// The share of a trace's time in which no kernel of the model ran on any stream; what a kernel does
// before the trace's begin or after its end does not count. Waits are no kernels, and those that
// only move K and V over the link are none of the model.
double IdleShare(const StepTrace& trace);

// The value below which that share of the values lie; 0 of none.
double Percentile(std::vector<double> values, double share);

}  // namespace sluice::bench
