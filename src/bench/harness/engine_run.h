// Runs the real engine over a device, a model and a policy, without gRPC. Sequences are handed over
// with caches of random values, zeros or computed contexts and decode together; the engine's
// measurements of its steps are read in windows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/attention/attention_policy.h"
#include "src/bench/workload/context.h"
#include "src/device/device.h"
#include "src/engine/drafter.h"
#include "src/engine/turn_trace.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/request/token_sink.h"

namespace sluice::bench {

// Means over a window of steps in which every sequence has a row.
struct EngineWindow {
  uint64_t steps = 0;
  double step_seconds = 0;     // Time from one step's end to the next.
  double kernels_seconds = 0;  // Forward pass and sampling, by the device's clock.
  double turn_seconds = 0;     // Time in which the engine's thread was busy.
  absl::Time begin, end;
  std::vector<double> token_gaps;  // Seconds between two tokens of one sequence.
};

struct EngineRunOptions {
  int batch = 1;
  int context = 512;
  int windows = 4;
  int steps = 10;              // Steps in a window.
  bool random_context = true;  // Random values (random_caches.h); otherwise zeros.
  // Contexts to hand over instead, in turn; each has `context` tokens.
  const std::vector<Context>* contexts = nullptr;
  PagePool* dram = nullptr;  // Pool of the host KV caches; null: the run allocates one.
  // Maximum time without progress while sequences are handed over and admitted.
  absl::Duration patience = absl::Seconds(20);
  // Guesses the sequences' next tokens, up to `draft_tokens` of each in a step; null: no
  // speculation.
  Drafter* drafter = nullptr;
  int draft_tokens = 0;
  // The last token of the prompt of sequence i is i, modulo the vocabulary, so that sequences
  // differ and a drafter can tell them apart; otherwise all prompts are equal. Ignored if contexts
  // are given.
  bool distinct_prompts = false;
  // Decodes on after the last window until every sequence has its EngineTokens tokens.
  bool to_the_end = false;
  // Called on the engine's thread with each token of the sequence that was handed over as number
  // `sequence`, from 0.
  std::function<void(size_t sequence, const OutputToken& token)> on_token = nullptr;
  // Receives the engine's phases, including those before the windows.
  TurnTrace* trace = nullptr;
  // Called on the engine's thread one step before the first window (false) and after the last one
  // (true), to read counters. Steps are in flight, so counters may include a part of them.
  std::function<void(bool last)> on_edge = nullptr;
  // Called likewise where each window begins or ends: mark 0 is the begin of the first window. A
  // step may be in flight, so counters may be one step ahead.
  std::function<void(size_t mark)> on_mark = nullptr;
  // Called likewise after the first `first_tokens` tokens of each sequence.
  int first_tokens = 0;
  std::function<void()> on_first = nullptr;
};

// Tokens of each sequence before the first window.
inline constexpr int kEngineWarmUpTokens = 3;

// Returns the tokens that each sequence may add to its context: models and policies need room for
// them.
int EngineTokens(const EngineRunOptions& options);

// REQUIRES: `policy` has `slots` free slots; they are free again afterwards. RESOURCE_EXHAUSTED:
// the whole batch does not fit at once.
absl::StatusOr<std::vector<EngineWindow>> RunEngine(const EngineRunOptions& options, int slots,
                                                    Device* device, Model* model, PagePool* hbm,
                                                    AttentionPolicy* policy);

}  // namespace sluice::bench
