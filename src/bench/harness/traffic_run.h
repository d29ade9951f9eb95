// Runs the real engine over sequences that do not march in step: of unlike lengths, arriving and
// ending at different times, whose topics jump. Every step is timed by itself, so that what a jump
// or an arrival costs the others can be told.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/attention/attention_policy.h"
#include "src/bench/harness/engine_run.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice::bench {

struct TrafficSequence {
  size_t context = 0;  // Index into the contexts.
  // Tokens of the first sequence after which this one is submitted; its caches are in DRAM by then.
  int after = 0;
  int tokens = 0;  // Tokens that it generates.
};

struct TrafficRun {
  std::vector<double> steps;  // Seconds of each step, in order, without the first ones.
  std::vector<double> gaps;   // Seconds between two tokens of a sequence, of all sequences.
  // Seconds of the steps in which a sequence was fed the first token of another topic, and of the
  // three steps after each.
  std::vector<double> jumps, after_jumps;
  // Seconds of the steps while a sequence that was submitted later waited for its first token.
  std::vector<double> beside_arrivals;
  double tokens_per_second = 0;
  absl::Time begin, end;  // The stretch of the steps.
};

// Decodes the sequences over options.contexts, the longest of which has options.context tokens. The
// first of them must outlive the others' submissions. `jump` is TopicDrift::jump; 0: none is
// counted. Errors as of RunEngine.
absl::StatusOr<TrafficRun> RunTraffic(const EngineRunOptions& options,
                                      const std::vector<TrafficSequence>& sequences, int jump,
                                      int slots, Device* device, Model* model, PagePool* hbm,
                                      AttentionPolicy* policy);

}  // namespace sluice::bench
