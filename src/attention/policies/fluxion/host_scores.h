// The published form's selection, by CPU workers: the scores of blocks from digests in DRAM, with
// the arithmetic of LevelScores' CPU path, and each list's blocks by SelectUnion's. It makes the
// lists of co-attention's rounds (src/attention/offload/list_maker.h), so that a layer of a step
// asks its workers once, for all that Fluxion's task is.
//
// The device posts what PlanRetrieval chose beside the queries. The workers of a sequence's group
// divide the blocks of its lists evenly, since digests have the same bytes at every level: a list
// is cut into parts, and workers claim parts, each first those of its own share and then any that
// are left (src/attention/offload/part_board.h). A block's score stands alone, so that no bit
// depends on who computed it. A digest is read once for all query heads of its KV head. Whoever
// finishes the last part of a list selects for it at once. Scores stay in memory of the host.
//
// A list is what SelectUnion selects, without the units that have a place in HBM. These are the
// ring's alone: the sink's are left out by SelectUnion, and no other block has a place in this form
// (CheckFluxionOptions).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "kernels/kernel_table.h"
#include "src/attention/offload/list_maker.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policy_statistics.h"
#include "src/device/device.h"

namespace sluice {

class HostScores : public ListMaker {
 public:
  struct Options {
    Device* device = nullptr;
    const kernels::KernelTable* kernels = nullptr;  // null: the best for this processor
    int workers = 1;
    FluxionShape shape;
    // [layers] Digests in DRAM, with tables that the host can read; those of dense layers are not
    // looked at. A round's channel is its layer.
    std::vector<kernels::LevelDigests> digests;
    // The choices of PlanRetrieval, in device memory: [lists], and [rows][heads].
    const int32_t* levels = nullptr;
    const int32_t* blocks = nullptr;
  };
  // RESOURCE_EXHAUSTED: there is no memory for requests and scores. UNIMPLEMENTED: the kernels lack
  // LevelScores or SelectUnion.
  static absl::StatusOr<std::unique_ptr<HostScores>> Create(const Options& options);
  ~HostScores() override;

  void Post(int rows, kernels::CopyRowsParams* copies) override;
  void Take(int worker, const Round& round, const SlotWorkers& workers) override;
  std::optional<int> Claim(int worker, const Round& round) override;
  void Compute(int worker, int channel) override;
  std::optional<int64_t> Give(int worker, const Round& round) override;

  // Adds what was selected in the layer to its steps, selected and missing tokens, as SelectUnion
  // and DivideLists count them on a device. Any thread.
  void Count(int layer, PolicyStatistics::Layer* sums) const;

 private:
  // The request that the device posts, in pinned memory, and the scores, which workers share.
  struct Side {
    int32_t* levels = nullptr;  // [lists]
    int32_t* blocks = nullptr;  // [rows][heads]
    float* scores = nullptr;    // [rows * heads][score_stride]
  };
  struct Counters {
    std::atomic<int64_t> steps{0}, selected{0}, missing{0};
  };
  class Worker;

  explicit HostScores(const Options& options);
  absl::Status Allocate();

  const Options options_;
  Buffer request_;
  std::unique_ptr<float[]> scores_;
  Side side_;
  std::unique_ptr<Counters[]> counters_;         // [layers]
  std::vector<std::unique_ptr<Worker>> shares_;  // by worker
};

}  // namespace sluice
