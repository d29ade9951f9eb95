#include "src/attention/policies/ess/row_copies.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {

RowCopies::RowCopies(Device* device, Buffer host, int32_t lists, int32_t capacity)
    : lists_(lists), capacity_(capacity), host_(std::move(host)), there_(device->NewEvent()) {}

absl::StatusOr<std::unique_ptr<RowCopies>> RowCopies::Create(Device* device, int32_t lists,
                                                             int32_t capacity) {
  const int64_t words = int64_t{lists} * (1 + 2 * int64_t{capacity});
  Buffer host;
  SLUICE_RETURN_IF_ERROR(BufferAllocator(device, "lists of entries on the host")
                             .Words(MemoryKind::kPinned, words, &host));
  return std::unique_ptr<RowCopies>(new RowCopies(device, std::move(host), lists, capacity));
}

void RowCopies::Enqueue(Stream& stream, const kernels::TransferParams& move) {
  SLUICE_CHECK(move.lists <= lists_ && move.capacity == capacity_ && move.source_units != nullptr &&
               move.target_units != nullptr);
  auto* const counts = host_.as<int32_t>();
  int32_t* const sources = counts + lists_;
  const int64_t units = int64_t{move.lists} * capacity_;
  int32_t* const targets = sources + units;
  const auto bytes = static_cast<size_t>(units) * sizeof(int32_t);
  stream.Copy(counts, move.counts, static_cast<size_t>(move.lists) * sizeof(int32_t));
  stream.Copy(sources, move.source_units, bytes);
  stream.Copy(targets, move.target_units, bytes);
  stream.Record(*there_);
  there_->Wait();
  for (int32_t list = 0; list < move.lists; ++list) {
    for (int64_t i = int64_t{list} * capacity_, end = i + counts[list]; i < end; ++i) {
      stream.Copy(static_cast<uint8_t*>(move.target) + targets[i] * move.target_pitch,
                  static_cast<const uint8_t*>(move.source) + sources[i] * move.source_pitch,
                  static_cast<size_t>(move.unit_bytes));
    }
  }
}

}  // namespace sluice
