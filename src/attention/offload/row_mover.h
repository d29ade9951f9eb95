// Fetches K and V of single tokens from the host KV cache to their places in HBM. There are two
// ways, which give the same bytes:
//   kUva  the device itself reads the rows where they lie in pinned memory;
//   kCpu  CPU workers gather the rows in pinned staging buffers, part by part, and the device reads
//         each part in order while they gather the next one. This is a baseline to the first way.
//
// Move is called while a step is enqueued, on the engine's thread, and may be recorded.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/params.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"

namespace sluice {

class RowMover {
 public:
  struct Options {
    PolicyOptions::Mover kind = PolicyOptions::Mover::kUva;
    Device* device = nullptr;
    int slots = 0;
    int max_rows = 0;
    int kv_heads = 0;
    int32_t capacity = 0;  // entries of a list
    // The host cache of any layer: units count from its base, which all layers share. Its table is
    // not read. Pages in HBM are like its pages.
    kernels::PagedCache home{};
    void* resident = nullptr;  // the base from which units in HBM count
    // Options of kCpu. The workers form two groups where they can, so that half of the sequences
    // survive the loss of a worker.
    int workers = 4;  // from 1 to Mailbox::kMaxWorkers
    absl::Duration deadline = absl::Seconds(1);
  };

  // The tokens that the rows of a step fetch in a layer, in device memory. There is one list for
  // each (row, KV head). A unit is the index of a token's K row, as Recall writes it; the V row
  // lies block_tokens rows further.
  struct Lists {
    const int32_t* slots = nullptr;         // [rows]; negative: a padded row, whose lists are empty
    const int32_t* source_units = nullptr;  // [rows * kv_heads][capacity], in home
    const int32_t* target_units = nullptr;  // the same, in resident
    const int32_t* counts = nullptr;        // [rows * kv_heads], each at most capacity
    int32_t rows = 0;
  };

  // INVALID_ARGUMENT: a size is out of range. RESOURCE_EXHAUSTED: there is no pinned memory for
  // the lists and the staging buffers of kCpu. Errors of Device::NewWorkerTeam come through.
  static absl::StatusOr<std::unique_ptr<RowMover>> Create(const Options& options);
  virtual ~RowMover() = default;

  // Fetches the tokens of `lists`. The moves of neighbouring layers may be under way at once, on
  // streams of the caller's choice: Move(layer) comes after Move(layer - 2).
  virtual void Move(Stream& stream, int layer, const Lists& lists) = 0;
  // Returns the workers, with which every sequence must Join; null: there are none. K and V of a
  // sequence that they failed may be missing in HBM.
  virtual SlotWorkers* workers() { return nullptr; }
};

}  // namespace sluice
