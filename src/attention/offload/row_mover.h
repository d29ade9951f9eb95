// Fetches units of the host cache to their places in HBM: K and V of single tokens, or latent
// entries. There are two ways, which give the same bytes:
//   kUva  the device itself reads the units where they lie in pinned memory;
//   kCpu  CPU workers read them and write them into a small ring in pinned memory, out of which the
//         device takes them meanwhile. Its rate does not fall with the memory that a step visits.
//
// Move is called while a step is enqueued, on the engine's thread, and may be recorded.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"

namespace sluice {

class RowMover {
 public:
  // Moves that may be under way at once.
  static constexpr int kSides = 2;

  struct Options {
    PolicyOptions::Mover kind = PolicyOptions::Mover::kUva;  // not kAuto
    Device* device = nullptr;
    int slots = 0;
    int max_rows = 0;
    int lists_per_row = 1;
    int32_t capacity = 0;  // entries of a list
    // Units of both sides count from these bases, unit_bytes apart. A unit may have further parts
    // of as many bytes, part_pitch bytes apart (K and V of a token), as in TransferParams.
    const void* source = nullptr;
    void* target = nullptr;
    int32_t unit_bytes = 0;
    int32_t parts = 1;
    int64_t part_pitch = 0;
    int32_t processors = 0;  // TransferParams::max_workers
    // Options of kCpu. The workers form two groups where they can, so that half of the sequences
    // survive the loss of a worker.
    int workers = 4;  // from 1 to Mailbox::kMaxWorkers
    absl::Duration deadline = absl::Seconds(1);
    int64_t ring_bytes = int64_t{4} << 20;  // of a side, as far as each worker has a few places
  };

  // The units that the rows of a step fetch, in device memory. An entry with a negative source is
  // skipped.
  struct Lists {
    const int32_t* slots = nullptr;         // [rows]; negative: a padded row, whose lists are empty
    const int32_t* source_units = nullptr;  // [rows * lists_per_row][capacity]
    const int32_t* target_units = nullptr;  // the same
    const int32_t* counts = nullptr;        // [rows * lists_per_row], each at most capacity
    int32_t rows = 0;
  };

  // INVALID_ARGUMENT: a size is out of range. RESOURCE_EXHAUSTED: there is no pinned memory for
  // the lists and the rings of kCpu. Errors of Device::NewWorkerTeam come through.
  static absl::StatusOr<std::unique_ptr<RowMover>> Create(const Options& options);
  virtual ~RowMover() = default;

  // Fetches the units of `lists`. Moves of the two sides may be under way at once, on streams of
  // the caller's choice; a Move comes after the one before it of the same side. The last operator
  // that it enqueues lets the next kernel begin once the transfer has begun
  // (SparseMlaParams::then_arrives).
  virtual void Move(Stream& stream, int side, const Lists& lists) = 0;
  // Returns the workers, with which every sequence must Join; null: there are none. Units of a
  // sequence that they failed may be missing in HBM. They read the host cache of a sequence only
  // within its steps.
  virtual SlotWorkers* workers() { return nullptr; }
};

}  // namespace sluice
