#include "src/attention/offload/row_mover.h"

#include "absl/strings/str_cat.h"
#include "src/attention/offload/gather_mover.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

class UvaMover : public RowMover {
 public:
  explicit UvaMover(const Options& options) : options_(options) {}

  void Move(Stream& stream, int /*layer*/, const Lists& lists) override {
    const kernels::PagedCache& home = options_.home;
    const int64_t row_bytes = int64_t{home.head_dim} * SizeOf(home.type);
    kernels::TransferParams move{};
    move.source = home.base;
    move.target = options_.resident;
    move.source_pitch = move.target_pitch = row_bytes;
    move.source_units = lists.source_units;
    move.target_units = lists.target_units;
    move.counts = lists.counts;
    move.lists = lists.rows * options_.kv_heads;
    move.capacity = options_.capacity;
    move.unit_bytes = static_cast<int32_t>(row_bytes);
    // K and V of a token together: their rows lie near each other, so that the link serves them at
    // nearly twice the rate of rows of one kind.
    move.parts = 2;
    move.part_pitch = home.block_tokens * row_bytes;
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
