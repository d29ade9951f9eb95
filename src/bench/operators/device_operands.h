// Memory for the operands of operators that are timed on a device: it is filled through a stream
// and lives as long as the object. The first error is kept, after which nothing is allocated.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "src/device/device.h"

namespace sluice::bench {

class DeviceOperands {
 public:
  explicit DeviceOperands(Device& device)
      : device_(device), stream_(device.NewStream(Device::StreamKind::kCompute)) {}

  Device& device() { return device_; }
  std::mt19937& random() { return random_; }
  // RESOURCE_EXHAUSTED: the device lacks the memory.
  const absl::Status& status() const { return status_; }
  void Fail(const absl::Status& status) { status_.Update(status); }

  // Returns memory of at least 16 bytes, or null after an error.
  void* Room(MemoryKind kind, int64_t bytes);
  template <typename T>
  T* Room(int64_t count) {
    return static_cast<T*>(Room(MemoryKind::kDevice, count * static_cast<int64_t>(sizeof(T))));
  }
  template <typename T>
  T* Put(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    T* const data = Room<T>(static_cast<int64_t>(values.size()));
    Fill(data, bytes, values.data(), bytes);
    return data;
  }
  // Fills `to` with repeated copies of `from`.
  void Fill(void* to, int64_t bytes, const void* from, int64_t from_bytes);
  // Returns bf16 values of both signs and magnitude about 1.
  void* RandomBf16(MemoryKind kind, int64_t bytes);
  // Returns memory whose bytes are e4m3 values, none of them NaN.
  void* RandomE4M3(MemoryKind kind, int64_t bytes);
  // Returns room for activations that are zero, of the type that the device's kernels read.
  void* Activations(int64_t count);

 private:
  Device& device_;
  const std::unique_ptr<Stream> stream_;
  std::mt19937 random_{1};
  absl::Status status_;
  std::vector<Buffer> buffers_;
};

}  // namespace sluice::bench
