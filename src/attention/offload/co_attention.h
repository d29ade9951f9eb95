// Co-attention: CPU workers that attend to lists of units in the sequences' home while the device
// goes on, fed and answered through a mailbox.
//
// A *channel* is one request that may be under way, one for each layer. Start posts queries and
// lists to pinned memory, in one launch, and raises the request; workers compute (o, lse) of every
// (row, KV head); Finish makes its stream wait for that and brings it to device memory, in one
// launch. Both may be recorded, and are on streams of the caller's choice, one after the other: a
// stream that only waits for answers keeps nobody else. At most two channels are under way at once,
// of neighbouring layers: Start(channel) comes after Finish(channel - 2).
//
// Workers are in groups, a sequence (a slot) belongs to one group, whose workers share its KV
// heads; a head's K and V are read once for all its query heads. A worker that fails, dies or
// misses the deadline ends the sequences of its group (Health); the step goes on. One that missed
// the deadline may still read the home of the sequence that it is at: until it has come back the
// slot is not at rest (AtRest), and nothing of it may become another's.
#pragma once

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/policy_statistics.h"
#include "src/device/device.h"

namespace sluice {

class CoAttention {
 public:
  // One row and KV heads [head_begin, head_end) of it, as a worker gets them.
  struct Task {
    int channel = 0;
    int slot = 0;
    int position = 0;
    int head_begin = 0;
    int head_end = 0;
    const float* q = nullptr;  // [heads][head_dim], here and below; only the task's heads of it
    float scale = 0;
    float* o = nullptr;    // [heads][head_dim]
    float* lse = nullptr;  // [heads]
  };
  // What workers attend to where no list of the device's says it: the host's own tables do.
  class Source {
   public:
    virtual ~Source() = default;
    // Writes o and lse of the task's heads. On worker `worker`; the heads of a row are one task or
    // several, on any workers of its group. The task's memory is the worker's own, and the slot is
    // not at rest meanwhile. `owes`: whether the round still waits for the worker; after a false
    // nothing that is written counts, and it may return. Not OK: as when a worker fails.
    virtual absl::Status Attend(int worker, const Task& task, absl::FunctionRef<bool()> owes) = 0;
  };

  struct Options {
    Device* device = nullptr;
    const kernels::KernelTable* kernels = nullptr;  // null: the best of this processor
    int workers = 1;
    absl::Duration deadline = absl::Seconds(1);
    int slots = 0;
    int layers = 0;
    int max_rows = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int capacity = 0;  // units of a list at most
    int unit_tokens = 0;
    // Outlives the result. There are no lists then; capacity and unit_tokens are not read.
    Source* source = nullptr;
  };
  static absl::StatusOr<std::unique_ptr<CoAttention>> Create(const Options& options);
  virtual ~CoAttention() = default;

  // `lists`: the units that each (row, KV head) attends to, in device memory; not read where there
  // is a source. `home`: the layer's, with a table that
  // the host can read.
  virtual void Start(Stream& stream, int channel, const KvAttention::Queries& queries,
                     const kernels::UnitLists& lists, const kernels::PagedCache& home) = 0;
  // o [rows][heads][head_dim] and lse [rows][heads], in device memory; `slots` and `rows` as at
  // Start. Those of padded rows are left as they are.
  virtual void Finish(Stream& stream, int channel, const int32_t* slots, int rows, float* o,
                      float* lse) = 0;

  // A new sequence moves into the slot.
  virtual void Join(int slot) = 0;
  // INTERNAL, reason WORKER_FAILED: workers failed the sequence in the slot since Join.
  virtual absl::Status Health(int slot) const = 0;
  // Whether no worker is at work on the slot's sequence for a step that is done. REQUIRES, for an
  // answer that stays: every step that has the slot is done.
  virtual bool AtRest(int slot) const = 0;
  // To wait for it; of the host's alone, no stream records it.
  virtual Event& RestEvent(int slot) = 0;

  // Any thread.
  virtual WorkerStatistics Statistics() const = 0;
};

}  // namespace sluice
