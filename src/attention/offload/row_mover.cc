#include "src/attention/offload/row_mover.h"

#include "src/attention/offload/gather_mover.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

class UvaMover : public RowMover {
 public:
  explicit UvaMover(const Options& options) : options_(options) {}

  void Move(Stream& stream, int /*side*/, const Lists& lists) override {
    kernels::TransferParams move{};
    move.source = options_.source;
    move.target = options_.target;
    move.source_pitch = move.target_pitch = options_.unit_bytes;
    move.source_units = lists.source_units;
    move.target_units = lists.target_units;
    move.counts = lists.counts;
    move.lists = lists.rows * options_.lists_per_row;
    move.capacity = options_.capacity;
    move.unit_bytes = options_.unit_bytes;
    move.max_workers = options_.processors;
    // K and V of a token together: their rows lie near each other, so that the link serves them at
    // nearly twice the rate of rows of one kind.
    move.parts = options_.parts;
    move.part_pitch = options_.part_pitch;
    options_.device->kernels().Transfer(stream, move);
  }

 private:
  const Options options_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RowMover>> RowMover::Create(const Options& options) {
  if (options.kind == PolicyOptions::Mover::kCpu) return NewGatherMover(options);
  return std::make_unique<UvaMover>(options);
}

}  // namespace sluice
