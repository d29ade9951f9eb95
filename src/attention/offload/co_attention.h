// Co-attention: CPU workers attend to lists of units in the sequences' host caches while the device
// goes on. A mailbox carries requests to them and answers back.
//
// A *channel* is one request that may be under way; each layer has one. Start posts queries and
// lists to pinned memory, in one launch, and raises the request. Workers compute (o, lse) of every
// (row, KV head). Finish makes its stream wait for that and copies it to device memory, in one
// launch. Both may be recorded, and are on streams of the caller's choice, one after the other: a
// stream that only waits for answers holds up no other work. At most two channels are under way at
// once, those of neighbouring layers: Start(channel) comes after Finish(channel - 2).
//
// Workers form groups (src/attention/offload/slot_workers.h). The workers of a group share the
// lists of its sequences; a head's K and V are read once for all its query heads. A list is cut
// into parts of equal numbers of units, by its length alone, and workers claim parts: each first
// those of a share that is its own by arithmetic, then any that are left. So a round waits for no
// worker while a part is unclaimed. Whoever finishes the last part of a list merges all of them in
// their order, so results do not depend on which worker did what, to the bit. A part is claimed
// once: if its worker fails, nobody else does it, and the sequences of the group end.
//
// Lists made in the round. With a ListMaker (src/attention/offload/list_maker.h) the device posts
// what lists are made of in place of the lists, and rings once: the workers make the lists and
// attend to those that are there. A worker first does what makes lists, so that as many of them as
// can be are there for whoever has nothing to make, the device among them, and goes on to parts of
// lists without waiting for others. It waits only if nothing is left but lists that others are
// making, for half a deadline at most, and not for those of a sequence that has failed: a worker
// that is stuck with one ends the group's sequences alone, and no other worker is blamed. One
// channel is under way at a time.
//
// The results of parts take max_rows * heads * (head_dim + 1) floats of host memory for each part
// that a list may have, twice, of which only what has been used is resident: 16 rows of 32 heads of
// 128 and 32 parts are 2 x 8.5 MB.
//
// Pull. With `pullers` the device takes parts of the same lists while the round goes on, over the
// link (kernels/pull_params.h). Pull enqueues this share, between Start and Finish, and its answer
// is beside that of the workers, where a part of the device counts as empty. Whoever is fast does
// more, so the bits of both answers follow timing. A worker beside the others, the *arbiter*,
// claims parts for the device; no group counts it. One channel is under way at a time then: Start
// comes after Finish and Pull of the channel before, in every order that the streams allow.
//
// If the arbiter dies, fails or misses the deadline, or the device waits for it as long as that,
// all sequences of the round end, and the device takes no more parts, ever: numbers that the two
// sides exchange may no longer agree. In later rounds the workers do everything. A step in which
// the device waits takes two deadlines at most.
//
// The device's results of parts take as much device memory as one of the two above: 8.5 MB there.
#pragma once

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/list_maker.h"
#include "src/attention/offload/slot_workers.h"
#include "src/device/device.h"

namespace sluice {

class CoAttention {
 public:
  // One row and its KV heads [head_begin, head_end), as a worker gets them.
  struct Task {
    int channel = 0;
    int slot = 0;
    int position = 0;
    int head_begin = 0;
    int head_end = 0;
    // [heads][head_dim], like the arrays below; only the task's heads are valid
    const float* q = nullptr;
    float scale = 0;
    float* o = nullptr;    // [heads][head_dim]
    float* lse = nullptr;  // [heads]
  };
  // A source tells workers what to attend to from tables of the host, where no list on the device
  // does.
  class Source {
   public:
    virtual ~Source() = default;
    // Writes o and lse of the task's heads, on worker `worker`. The heads of a row are one task or
    // several, on any workers of its group; no list is cut. The task's memory belongs to the
    // worker, and the slot is not at rest meanwhile. `owes` returns whether the round still waits
    // for the worker; once it has returned false nothing that is written counts, and the function
    // may return. An error counts like a failure of the worker.
    virtual absl::Status Attend(int worker, const Task& task, absl::FunctionRef<bool()> owes) = 0;
    // Writes how many tokens each KV head of a row attends to, [kv_heads], by which the workers of
    // a group divide the heads before they claim them. Each of them asks for itself, at any time
    // while the row's round is open. It may be an estimate; shares are even if all get the same
    // answer. Any worker.
    virtual void ListTokens(int channel, int slot, int32_t position, int32_t* tokens) const = 0;
  };

  struct Options {
    Device* device = nullptr;
    const kernels::KernelTable* kernels = nullptr;  // null: the best for this processor
    int workers = 1;
    absl::Duration deadline = absl::Seconds(1);
    int slots = 0;
    int layers = 0;
    int max_rows = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int capacity = 0;  // maximum units in a list
    int unit_tokens = 0;
    // K and V that a part of a list holds at least, in bytes, unless the list has no more. A list
    // of more than 32 such parts has larger ones. It is part of what a result's bits depend on, so
    // only tests and benches set it.
    int64_t part_bytes = 256 << 10;
    // Groups of the device's threads that take parts; 0: the device takes none, and Pull is not
    // called. The arbiter is one more thread, so that `workers` is below Mailbox::kMaxWorkers.
    int pullers = 0;
    // Makes the lists, in place of those of Start; null: the device makes them. It outlives the
    // result.
    ListMaker* maker = nullptr;
    // Outlives the result. With a source there are no lists, and capacity and unit_tokens are
    // ignored.
    Source* source = nullptr;
  };
  // INVALID_ARGUMENT: a shape is not above 0, or there is a source, and pullers or a maker
  // of lists; UNIMPLEMENTED:
  // there are pullers and the device is simulated, or the kernels lack an operator;
  // RESOURCE_EXHAUSTED: there is no memory. Further errors are those of Device::NewWorkerTeam.
  static absl::StatusOr<std::unique_ptr<CoAttention>> Create(const Options& options);
  virtual ~CoAttention() = default;

  // Posts the request of `channel`. `lists` are the units that each (row, KV head) attends to, in
  // device memory; they are ignored if there is a source or a maker of lists. `home` is the layer's
  // host cache, with a table that the host can read.
  virtual void Start(Stream& stream, int channel, const KvAttention::Queries& queries,
                     const kernels::UnitLists& lists, const kernels::PagedCache& home) = 0;
  // Writes the answer to o [rows][heads][head_dim] and lse [rows][heads], in device memory. `slots`
  // and `rows` are as at Start. The results of padded rows are left as they are.
  virtual void Finish(Stream& stream, int channel, const int32_t* slots, int rows, float* o,
                      float* lse) = 0;

  // Makes the device take parts of the lists of the channel's request, which was posted last.
  // `attention` is that request as the device sees it: its queries, the same lists (ignored if
  // there is a maker), the layer's host cache with a table of the device, and where its answer goes
  // (o, lse), in device memory. REQUIRES: there are pullers, and the stream is after Start; what
  // reads the answers comes after Pull and Finish.
  virtual void Pull(Stream& stream, int channel,
                    const kernels::SparseAttentionParams& attention) = 0;
  // Returns the tokens of the parts that the device was given on this channel since it was made;
  // the newest unit counts as a whole one. Any thread.
  virtual int64_t PulledTokens(int channel) const = 0;

  // Returns the workers, with which every sequence must Join.
  virtual SlotWorkers& workers() = 0;
};

}  // namespace sluice
