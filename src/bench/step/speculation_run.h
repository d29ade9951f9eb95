// The engine over the same sequences without drafts and with drafts that are right with a given
// probability: what speculation is worth, and whether the tokens stay the same.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/base/timing.h"
#include "src/bench/harness/engine_run.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice::bench {

// One of the two runs. The windows are those of the run's youngest sequence, and count the tokens
// of all sequences.
struct SpeculationSide {
  Timing tokens_per_second;                   // Of all sequences, by window.
  double seconds = 0;                         // All windows.
  int64_t steps = 0;                          // Likewise.
  int64_t tokens = 0;                         // Likewise, of all sequences.
  double tokens_per_step = 0;                 // Of one sequence.
  std::vector<std::vector<int32_t>> outputs;  // By sequence, all of its tokens.

  double rate() const { return static_cast<double>(tokens) / seconds; }
};

struct SpeculationResult {
  SpeculationSide plain, drafted;
  // Share of the drafts that became tokens, of those whose earlier drafts of the same step all did.
  double acceptance = 0;
  int64_t judged = 0;  // Those drafts.
};

struct SpeculationOptions {
  // Its drafter, callbacks and DRAM are ignored. A window has `steps` tokens of a sequence; those
  // are 1 + draft_tokens at least, so that a window has a step.
  EngineRunOptions run;
  int draft_tokens = 3;
  double probability = 0.7;
  // Whether the model's next-token layer makes drafts too, which are not those that are verified:
  // what it costs is then in the figures. REQUIRES: the model has one, and draft_tokens are at most
  // kernels::kMaxDeviceDrafts.
  bool draft_layer = false;
};

// Decodes the sequences twice, from the same caches. INTERNAL: a token differs between the two
// runs; the message names the sequence and the place. REQUIRES: as RunEngine, and a model whose
// steps have slots * (1 + draft_tokens) rows and logits.
absl::StatusOr<SpeculationResult> RunSpeculation(const SpeculationOptions& options, int slots,
                                                 Device* device, Model* model, PagePool* hbm,
                                                 AttentionPolicy* policy);

// Returns OK if both runs have the same tokens, and the error of RunSpeculation otherwise.
absl::Status CheckSameTokens(const std::vector<std::vector<int32_t>>& plain,
                             const std::vector<std::vector<int32_t>>& drafted);

// Returns the mean tokens of a sequence in a step with so many drafts, if each is right with a
// probability on its own: those before the first wrong one, and one more.
double ExpectedTokensPerStep(int draft_tokens, double probability);

}  // namespace sluice::bench
