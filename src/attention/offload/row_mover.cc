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
    const int64_t values = home.block_tokens * row_bytes;  // V of a block, after its K
    for (const int64_t part : {int64_t{0}, values}) {
      kernels::TransferParams move{};
      move.source = static_cast<const uint8_t*>(home.base) + part;
      move.target = static_cast<uint8_t*>(options_.resident) + part;
      move.source_pitch = move.target_pitch = row_bytes;
      move.source_units = lists.source_units;
      move.target_units = lists.target_units;
      move.counts = lists.counts;
      move.lists = lists.rows * options_.kv_heads;
      move.capacity = options_.capacity;
      move.unit_bytes = static_cast<int32_t>(row_bytes);
      options_.device->kernels().Transfer(stream, move);
    }
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
