// Runs one policy over a model under the memory caps that every policy of a comparison has:
// measures how many sequences it admits and how fast the real engine decodes them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/base/timing.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/workload/context.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/model/step_traffic.h"

namespace sluice::bench {

// The resources that all policies share, one after the other: a tier of 110 GiB takes long to
// allocate. Everything outlives the runs.
struct PolicyWorld {
  Device* device = nullptr;
  Model* model = nullptr;
  PagePool* hbm = nullptr;   // The cap for caches, digests and tables.
  PagePool* dram = nullptr;  // Holds the host KV caches.
  int max_context = 0;
  int slots = 1;
  PolicyOptions options;  // Device, pools, slots and sizes are filled in for each policy.
};

// The memory of both tiers. Each policy gets new pools in the same memory, because pinning 100 GiB
// takes half a minute.
class BenchTiers {
 public:
  // RESOURCE_EXHAUSTED names the tier.
  static absl::StatusOr<std::unique_ptr<BenchTiers>> Create(Device& device, int64_t hbm_bytes,
                                                            int64_t dram_bytes);
  // Makes the pools that the policy of that name needs, sets world->hbm and world->dram, and frees
  // the previous pools. REQUIRES: nobody holds pages of the previous pools.
  absl::Status Cut(PolicyWorld* world, const std::string& name);

 private:
  BenchTiers(Buffer hbm, Buffer dram);

  const Buffer hbm_memory_, dram_memory_;
  std::unique_ptr<PagePool> hbm_, dram_;
};

// Returns the options of the policy of that name.
PolicyOptions OptionsOf(const PolicyWorld& world, const std::string& name);

// Creates the policy. Returns the policy's errors with its name. REQUIRES: no other policy holds
// pages of the pools.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> SetUpPolicy(const PolicyWorld& world,
                                                             const std::string& name);

// How many sequences of `context` tokens, which grow to `total`, the policy admits together, at
// most its slots; and the resource that bounds them: "HBM", "DRAM" or "slots".
struct Admission {
  int batch = 0;
  std::string bound;
  Footprint each;
  int64_t hbm_bytes_each = 0, dram_bytes_each = 0;
};
Admission LargestBatch(const PolicyWorld& world, AttentionPolicy& policy, int64_t context,
                       int64_t total);

// The measurements of one run of a policy.
struct PolicyRun {
  std::string policy;  // Its name on the command line.
  std::string taken;   // The name that auto was resolved to; empty for other policies.
  int batch = 0;
  int context = 0;
  bool largest = false;  // The batch is the largest that the policy admits.
  Admission admission;
  float beta = 0;       // Policy hgca's.
  Timing step;          // Seconds of a step, over the windows.
  double tpot_p50 = 0;  // Seconds between tokens of one sequence.
  double tpot_p99 = 0;
  double idle_share = 0;  // Share of a traced run's time in which no kernel of the model ran.
  // Counted in the windows alone, without the first steps.
  PolicyStatistics statistics;
  WorkerStatistics workers;
  absl::Duration counted;    // Time over which `statistics` and `workers` were counted.
  MemoryTraffic step_bytes;  // Bytes that a step must move.
  int64_t budget_tokens = 0;
  int kv_heads = 0;
  bool latent = false;  // The model has latent caches.

  // Latent caches: statistics of each sequence's first kFirstSteps steps, and of the last windows.
  PolicyStatistics first, steady;

  double tokens_per_second() const { return batch / step.median; }
  // Means over the layers that select; 0 and 1 if no layer does.
  double CpuShare() const;
  double HitRate() const;
  // Decode rows per row with a recall, or lookups per miss under a policy that looks up labels; 0:
  // there was none.
  double RecallInterval() const;
  double LinkBytesPerStep() const;
  // Tokens per row and KV head that the CPU attended to or the link brought.
  double CpuTokens() const;
  // Share of that time in which a CPU worker was busy, on average; 0: there are none. What is left
  // of 1 is the processor's idle time, as IdleShare is the device's.
  double WorkersBusy() const;
};

// Return the entries of latent caches that a sequence misses in a step, by layer; and their spread
// over the layers.
std::vector<double> MissesByLayer(const PolicyStatistics& statistics);
struct LayerSpread {
  double mean = 0, least = 0, most = 0;
};
LayerSpread SpreadOfLayers(const std::vector<double>& layers);
// ESS, section 3.2, looks at this many first steps of a pool.
inline constexpr int kFirstSteps = 16;

// Decodes `batch` of the contexts, handed over in turn, in windows of `steps`. If `trace` is not
// null, decodes once more under the trace.
absl::StatusOr<PolicyRun> RunPolicy(const PolicyWorld& world, const std::string& name,
                                    const std::vector<Context>& contexts, int batch, int steps,
                                    StepTrace* trace);
// Returns the tokens that RunPolicy needs beyond the context.
int PolicyRunTokens(int steps);

// Finds a beta of policy hgca with which the CPU attends to `tokens` tokens on average for each row
// and KV head. Searches by bisection; each try is a short run of one sequence.
struct MeanSelection {
  float beta = 0;
  double tokens = 0;
};
absl::StatusOr<MeanSelection> FindMeanSelection(const PolicyWorld& world, const std::string& name,
                                                const std::vector<Context>& contexts,
                                                double tokens);

// Returns the share of a trace's time in which no kernel of the model ran on any stream. Only the
// part of a kernel inside the trace counts. Waits are not kernels. Kernels that only move K and V
// over the link are not the model's, nor are those that measure the anchor of a sequence that is
// being warmed up. Attention over the link is, and so is PullAttention, which also runs while it
// waits for parts: of a policy that pulls, the share is the least that it may be.
double IdleShare(const StepTrace& trace);

// Returns the value below which that share of the values lie; 0 if there are none.
double Percentile(std::vector<double> values, double share);

}  // namespace sluice::bench
