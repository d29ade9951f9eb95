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
#include "src/bench/context.h"
#include "src/bench/step_trace.h"
#include "src/bench/timing.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice {

// What all policies share. Everything outlives the runs.
struct PolicyWorld {
  Device* device = nullptr;
  Model* model = nullptr;
  int64_t hbm_bytes = 0;
  int64_t dram_bytes = 0;
  int max_context = 0;
  int slots = 1;
  PolicyOptions options;  // device, pools, slots and sizes are filled in for each policy
};

// A policy with pools of its own.
struct PolicySetup {
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<AttentionPolicy> policy;
};
absl::StatusOr<PolicySetup> SetUpPolicy(const PolicyWorld& world, const std::string& name);

// Sequences of `total` tokens at their end that the policy admits together, at most its slots.
int LargestBatch(PolicySetup& setup, int slots, int64_t total);

// What a run of one policy comes to.
struct PolicyRun {
  std::string policy;
  int batch = 0;
  int context = 0;
  Timing step;          // seconds, of windows
  double tpot_p50 = 0;  // seconds between tokens of one sequence
  double tpot_p99 = 0;
  double idle_share = 0;  // of a traced run: time in which no kernel of the model ran
  PolicyStatistics statistics;
  int64_t budget_tokens = 0;
  int kv_heads = 0;

  double tokens_per_second() const { return batch / step.median; }
  // Means over the layers that select; 0 and 1 where none does.
  double CpuShare() const;
  double HitRate() const;
  double RecallInterval() const;  // decode rows for each one with a recall; 0: there was none
  double LinkBytesPerStep() const;
};

// Decodes `batch` of the contexts, handed over in turn, in windows of `steps`; then once more under
// the trace, which goes to `trace` if that is not null.
absl::StatusOr<PolicyRun> RunPolicy(const PolicyWorld& world, const std::string& name,
                                    const std::vector<Context>& contexts, int batch, int steps,
                                    StepTrace* trace);
// Tokens that RunPolicy needs beyond the context.
int PolicyRunTokens(int steps);

// The share of a trace's time in which no kernel ran on any stream; what a kernel does before the
// trace's begin or after its end does not count. Waits are no kernels.
double IdleShare(const StepTrace& trace);

// The value below which that share of the values lie; 0 of none.
double Percentile(std::vector<double> values, double share);

}  // namespace sluice
