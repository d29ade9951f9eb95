// The device's share of co-attention's lists in rounds in which it pulls parts: what it runs, the
// words and results that it has for that, and the duty of the arbiter, a CPU worker of its own.
// Only co_attention.cc uses it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/part_arbiter.h"
#include "src/attention/offload/part_board.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/offload/worker_share.h"
#include "src/device/device.h"

namespace sluice {

class PullShare {
 public:
  // INVALID_ARGUMENT: the options have a source, or more pullers than operators take;
  // UNIMPLEMENTED: streams of the device and workers share one thread, so that a puller would wait
  // for ever; RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<PullShare>> Create(const CoAttention::Options& options);

  // The device's side: enqueues its share of the round, whose lists `attention` has as the device
  // sees them, in pinned memory where they are made in the round, and the merge of its results into
  // attention.o and attention.lse.
  void Enqueue(Stream& stream, const kernels::SparseAttentionParams& attention);

  // The arbiter's side. It answers asks until each puller knows that nothing is left; where lists
  // are made in the round, an ask waits for the next of them. If it cannot,
  // because it is late, fails or dies, or because a puller gave up, it closes the pulling for good.
  // Its errors are those of a worker's share of a round.
  absl::Status Arbitrate(SlotWorkers& workers, int channel, const CoAttentionSide& side,
                         const PartBoard& board);

  // Any worker's side: closes the pulling if a puller gave up in a round before, in case the
  // arbiter has not come back to do so. REQUIRES: the worker has taken up a round.
  void CloseIfMissed(SlotWorkers& workers) const;

  // Returns the tokens of all parts that the device was given on the channel; the newest unit
  // counts as a whole one. Any thread.
  int64_t tokens(int channel) const {
    return tokens_[static_cast<size_t>(channel)].load(std::memory_order_relaxed);
  }

 private:
  // The words, each in a line of its own.
  struct alignas(64) Word {
    uint32_t value;
  };

  PullShare(const CoAttention::Options& options, Buffer words, Buffer results);
  static PullWords WordsOf(const Buffer& words, int pullers);
  int arbiter() const { return options_.workers; }
  void Close(SlotWorkers& workers) const;
  bool TakeLists(SlotWorkers& workers, const CoAttentionSide& side);
  void OfferMade(const SlotWorkers& workers, const CoAttentionSide& side, const PartBoard& board);
  // kWait: the ask is not answered yet, since lists are still to be made.
  enum class Reply { kAnswered, kWait, kTooLate };
  Reply Answer(SlotWorkers& workers, int puller, int channel, const CoAttentionSide& side,
               const PartBoard& board);
  void FinishForDevice(const PartArbiter::Part& granted, int channel, const CoAttentionSide& side,
                       const PartBoard& board);

  const CoAttention::Options options_;
  const PartAnswers answers_;
  const int most_parts_;
  const Buffer words_;    // pinned
  const Buffer results_;  // of parts, in device memory
  const PullWords view_;
  PartArbiter arbiter_;
  // Lists of the round under way that were not made yet when the arbiter last looked, with their
  // slots. None where the device makes the lists.
  struct Awaited {
    int64_t list;
    int slot;
  };
  std::vector<Awaited> awaited_;
  std::chrono::steady_clock::time_point
      patient_until_;                               // from then on the arbiter waits for no list
  std::unique_ptr<std::atomic<int64_t>[]> tokens_;  // [layers]
};

}  // namespace sluice
