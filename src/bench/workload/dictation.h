// Runs one sequence under one policy, step by step, with tokens that the caller dictates instead of
// sampling them. So different policies can be compared on the same text.
//
// The sequence takes the engine's path: it is handed over into its host KV cache, admitted, warmed,
// and then has one decode row per step. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/attention_policy.h"
#include "src/bench/workload/context.h"
#include "src/device/allocation.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"

namespace sluice::bench {

class Dictation {
 public:
  struct Parts {
    Device* device = nullptr;
    Model* model = nullptr;
    AttentionPolicy* policy = nullptr;  // REQUIRES: slot 0 is free.
    PagePool* dram = nullptr;           // Pool of the host KV cache.
    int max_context = 0;                // Maximum tokens in a sequence.
  };
  static absl::StatusOr<std::unique_ptr<Dictation>> Create(const Parts& parts);
  ~Dictation();

  // Ends the previous sequence and starts one of up to `total` tokens. All of `context` but its
  // last token is handed over; the first step computes that token, after the rehearsals that the
  // policy asks for. RESOURCE_EXHAUSTED if the sequence does not fit.
  absl::Status Begin(const Context& context, int total);
  // Computes the newest token and returns the logits, [vocab], of the token that follows it. The
  // span is valid until the next step. Returns the policy's SlotHealth on failure. Append() adds
  // the token of the next step.
  absl::StatusOr<absl::Span<const float>> Step();
  void Append(int32_t next);
  int tokens() const { return count_; }
  void End();

 private:
  // Computes the row of a token, as one of the prompt or as a decode row, and its logits.
  absl::Status Run(int32_t position, bool is_prompt);
  explicit Dictation(const Parts& parts);
  absl::Status Allocate();
  // Waits for all enqueued work.
  absl::Status Finish();
  absl::Status WaitUntilWarm();

  const Parts parts_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> done_;
  std::unique_ptr<ContextReader> contexts_;
  // rows_ holds slot, position, logit row and decoded_.
  MirroredBuffer tokens_, rows_, logits_;
  int32_t decoded_ = 0;  // steps of the sequence so far
  int count_ = 0, total_ = 0;
  bool admitted_ = false;
};

}  // namespace sluice::bench
