// Allocation of several buffers for one purpose, with checked sizes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"

namespace sluice {

// A buffer of the device and a pinned buffer of the same size, which are copied to one another.
struct MirroredBuffer {
  Buffer device, host;
};

// Returns a buffer in the device's memory that holds `values`. An error names the purpose, which
// says what they are.
absl::StatusOr<Buffer> Uploaded(Device* device, absl::Span<const float> values,
                                const std::string& purpose);
absl::StatusOr<Buffer> Uploaded(Device* device, absl::Span<const int32_t> values,
                                const std::string& purpose);

// Allocates buffers on one device. Sizes are counts of elements; a negative size, or one that does
// not fit 63 bits, is RESOURCE_EXHAUSTED like a size that the device does not have. Every error
// names the purpose. A buffer that could not be allocated keeps its old value.
class BufferAllocator {
 public:
  // `purpose` says in errors what the buffers hold ("ess's page tables").
  BufferAllocator(Device* device, std::string purpose);

  absl::Status Array(MemoryKind kind, int64_t count, int64_t element_bytes, Buffer* buffer) const;
  // Allocates `words` elements of 4 bytes: int32, float or uint32.
  absl::Status Words(MemoryKind kind, int64_t words, Buffer* buffer) const {
    return Array(kind, words, 4, buffer);
  }
  // Allocates `words` elements of 4 bytes in each of both memories.
  absl::Status MirroredWords(int64_t words, MirroredBuffer* both) const;

 private:
  Device* const device_;
  const std::string purpose_;
};

}  // namespace sluice
