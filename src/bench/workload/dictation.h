// One sequence under one policy, step by step, whose tokens are dictated rather than sampled: what
// a policy makes of a text is compared with what another makes of the same text.
//
// The sequence's life is the engine's: handed over into its home, admitted, warm, then one decode
// row a step. One thread.
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
    AttentionPolicy* policy = nullptr;  // with a free slot 0
    PagePool* dram = nullptr;           // for homes
    int max_context = 0;                // tokens of a sequence at most
  };
  static absl::StatusOr<std::unique_ptr<Dictation>> Create(const Parts& parts);
  ~Dictation();

  // Ends the sequence before and starts one of up to `total` tokens: all of `context` but its last
  // token is handed over, and that one is what the first step gets. RESOURCE_EXHAUSTED where it
  // does not fit.
  absl::Status Begin(const Context& context, int total);
  // Computes the newest token and appends `next`: the logits, [vocab], of what should come in its
  // place; valid until the next step. The policy's SlotHealth.
  absl::StatusOr<absl::Span<const float>> Step();
  void Append(int32_t next);
  int tokens() const { return count_; }
  void End();

 private:
  // Memory of the device, and where the host reads and writes it.
  explicit Dictation(const Parts& parts);
  absl::Status Allocate();
  // Waits for what is enqueued.
  absl::Status Finish();
  absl::Status WaitUntilWarm();

  const Parts parts_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> done_;
  std::unique_ptr<ContextReader> contexts_;
  MirroredBuffer tokens_, rows_, logits_;  // rows_: slot, position, logit row
  int count_ = 0, total_ = 0;
  bool admitted_ = false;
};

}  // namespace sluice::bench
