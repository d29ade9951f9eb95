// Scores of blocks by CPU workers, from digests in DRAM: what the operator LevelScores computes on
// the device from digests in HBM, with the arithmetic of its CPU path.
//
// A round of a layer: Score posts the rows' queries and what PlanRetrieval chose for them to pinned
// memory, in one launch, and raises the request. The workers of a sequence's group divide the
// blocks of its lists evenly, since digests have the same bytes at every level: a list is cut into
// parts, and workers claim parts, each first those of its own share and then any that are left
// (src/attention/offload/part_board.h). A block's score stands alone, so that no bit depends on who
// computed it. A digest is read once for all query heads of its KV head. Rounds follow one another,
// so that one request and one answer suffice.
//
// The answer stays in pinned memory. SelectUnion reads each score once, and a copy to the device
// would read the same bytes over the link. (A row of more than 327,680 tokens in blocks of 16 is
// more than its shared memory keeps; it reads the scores beyond again.)
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "kernels/kernel_table.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/part_board.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/device/device.h"

namespace sluice {

class HostScores {
 public:
  using Queries = KvAttention::Queries;
  struct Options {
    Device* device = nullptr;
    const kernels::KernelTable* kernels = nullptr;  // null: the best for this processor
    int workers = 1;
    FluxionShape shape;
    // [layers] Digests in DRAM, with tables that the host can read; those of dense layers are not
    // looked at.
    std::vector<kernels::LevelDigests> digests;
  };
  // RESOURCE_EXHAUSTED: there is no memory for requests and scores. UNIMPLEMENTED: the kernels have
  // no LevelScores.
  static absl::StatusOr<std::unique_ptr<HostScores>> Create(const Options& options);
  ~HostScores();

  // Says which workers call Share, and that layer l is channel first_channel + l for them.
  // REQUIRES: before the first Score. The workers end before this object does.
  void ServeWith(SlotWorkers* workers, int first_channel);

  // Enqueues the scores of the rows' blocks. `levels` [lists] and `blocks` [rows][heads] are those
  // of PlanRetrieval, in device memory. Returns the scores as LevelScores leaves them, with
  // score_stride() of the shape: pinned memory, which the next call overwrites.
  const float* Score(Stream& stream, int layer, const Queries& queries, const int32_t* levels,
                     const int32_t* blocks);

  // Does a worker's share of a layer's round, as SlotWorkers::Share says.
  absl::StatusOr<bool> Share(int worker, int layer);

 private:
  // One request and its answer, in pinned memory.
  struct Side {
    int32_t* rows = nullptr;       // [1]
    PartWords* words = nullptr;    // [lists]; the state of the workers, 0 when a round begins
    int32_t* slots = nullptr;      // [rows]
    int32_t* positions = nullptr;  // [rows]
    int32_t* levels = nullptr;     // [lists]
    int32_t* blocks = nullptr;     // [rows][heads]
    float* q = nullptr;            // [rows][heads][head_dim]
    float* scores = nullptr;       // [rows * heads][score_stride]
  };
  class Worker;

  explicit HostScores(const Options& options);
  absl::Status Allocate();
  int64_t head_words() const { return 1 + 2 * options_.shape.lists(); }

  const Options options_;
  // int32 [rows + 1][head_words()]: how a request of so many rows begins, namely their number and
  // the lists' words. A stream copies it from here.
  Buffer heads_;
  Buffer request_, q_, scores_;
  Side side_;
  SlotWorkers* workers_ = nullptr;
  int first_channel_ = 0;
  std::vector<std::unique_ptr<Worker>> shares_;  // by worker
};

}  // namespace sluice
