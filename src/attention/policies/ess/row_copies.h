// A layer's fetch as an offloading system does it that was not built for rows of 656 bytes: the
// host waits for the lists of missing entries and enqueues one copy for each entry. It exists only
// to be compared with Transfer (ESS, section 3.1: rows of 656 bytes reach a small part of the
// link's bandwidth by cudaMemcpyAsync). The copy engine gets one call for each entry, and the
// host's wait is part of what is measured.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/params.h"
#include "src/device/device.h"

namespace sluice {

class RowCopies {
 public:
  // Creates one for up to `lists` lists of up to `capacity` units. RESOURCE_EXHAUSTED: there is no
  // memory for them.
  static absl::StatusOr<std::unique_ptr<RowCopies>> Create(Device* device, int32_t lists,
                                                           int32_t capacity);

  // Does what kernels().Transfer(stream, move) does, but waits for everything that `stream` has. It
  // cannot be part of a recording. REQUIRES: both sides have units by number, and lists have
  // neither offsets nor strides.
  void Enqueue(Stream& stream, const kernels::TransferParams& move);

 private:
  RowCopies(Device* device, Buffer host, int32_t lists, int32_t capacity);

  const int32_t lists_, capacity_;
  const Buffer host_;  // int32: counts [lists], then source and target units [lists][capacity]
  const std::unique_ptr<Event> there_;
};

}  // namespace sluice
