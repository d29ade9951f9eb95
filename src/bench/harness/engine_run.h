// The real engine over a device, a model and a policy, without gRPC: sequences that were handed
// over with caches of random values, zeros, or contexts that were computed, decode together, and
// what the engine notes of its steps is read in windows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/attention/attention_policy.h"
#include "src/bench/workload/context.h"
#include "src/device/device.h"
#include "src/engine/turn_trace.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice::bench {

// Means over a window of steps in which every sequence had a row.
struct EngineWindow {
  double step_seconds = 0;     // from one step's end to the next
  double kernels_seconds = 0;  // forward pass and sampling, as the device saw it
  double turn_seconds = 0;     // that the engine's thread was busy
  absl::Time begin, end;
  std::vector<double> token_gaps;  // seconds between two tokens of one sequence
};

struct EngineRunOptions {
  int batch = 1;
  int context = 512;
  int windows = 4;
  int steps = 10;              // of a window
  bool random_context = true;  // random_caches.h; else zeros
  // What is handed over instead, in turn; each of `context` tokens.
  const std::vector<Context>* contexts = nullptr;
  PagePool* dram = nullptr;  // where homes are; null: one of its own
  // For something to change, while sequences are handed over and admitted.
  absl::Duration patience = absl::Seconds(20);
  TurnTrace* trace = nullptr;  // told of the engine's phases, the ones before the windows too
  // Called on the engine's thread a step before the first window (false) and after the last (true),
  // for what is counted between the two. Steps are under way: what they count may be there in part.
  std::function<void(bool last)> on_edge = nullptr;
  // The same where each window begins or ends: mark 0 is the first one's begin. A step may be under
  // way, so what is counted may be one ahead.
  std::function<void(size_t mark)> on_mark = nullptr;
  // The same after the first `first_tokens` tokens of each sequence.
  int first_tokens = 0;
  std::function<void()> on_first = nullptr;
};

// Tokens of each sequence before the first window.
inline constexpr int kEngineWarmUpTokens = 3;

// Tokens that each sequence may add to its context: models and policies need room for them.
int EngineTokens(const EngineRunOptions& options);

// REQUIRES: `policy` has `slots` free slots; it has them again afterwards. RESOURCE_EXHAUSTED:
// there is no room for all of the batch at once.
absl::StatusOr<std::vector<EngineWindow>> RunEngine(const EngineRunOptions& options, int slots,
                                                    Device* device, Model* model, PagePool* hbm,
                                                    AttentionPolicy* policy);

}  // namespace sluice::bench
