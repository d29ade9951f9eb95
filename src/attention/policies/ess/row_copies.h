// A layer's fetch as an offloading system has it that was not built for 656-byte rows: the host
// waits for the lists of what is missing and enqueues one copy for each entry. For the comparison
// with Transfer alone (ESS, section 3.1: 656-byte rows by cudaMemcpyAsync reach a small part of
// the link). A call for each entry is what the copy engine is given, and the wait is part of it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/params.h"
#include "src/device/device.h"

namespace sluice {

class RowCopies {
 public:
  // For up to `lists` lists of up to `capacity` units. RESOURCE_EXHAUSTED: no memory for them.
  static absl::StatusOr<std::unique_ptr<RowCopies>> Create(Device* device, int32_t lists,
                                                           int32_t capacity);

  // What kernels().Transfer(stream, move) does. Waits for all that `stream` has; not in a
  // recording. REQUIRES: units by number on both sides, no offsets and no strides of lists.
  void Enqueue(Stream& stream, const kernels::TransferParams& move);

 private:
  RowCopies(Device* device, Buffer host, int32_t lists, int32_t capacity);

  const int32_t lists_, capacity_;
  const Buffer host_;  // int32: counts [lists], then source and target units [lists][capacity]
  const std::unique_ptr<Event> there_;
};

}  // namespace sluice
