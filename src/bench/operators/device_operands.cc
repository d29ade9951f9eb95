#include "src/bench/operators/device_operands.h"

#include <algorithm>
#include <cstring>

#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

constexpr int64_t kDifferent = 1 << 22;  // Bytes of random values, which then repeat.

}  // namespace

void* DeviceOperands::Room(MemoryKind kind, int64_t bytes) {
  if (!status_.ok()) return nullptr;
  absl::StatusOr<Buffer> buffer =
      device_.Allocate(kind, static_cast<size_t>(std::max<int64_t>(bytes, 16)), "operands");
  if (!buffer.ok()) {
    status_ = buffer.status();
    return nullptr;
  }
  buffers_.push_back(*std::move(buffer));
  return buffers_.back().data();
}

void DeviceOperands::Fill(void* to, int64_t bytes, const void* from, int64_t from_bytes) {
  if (!status_.ok() || bytes == 0) return;
  absl::StatusOr<Buffer> staged =
      device_.Allocate(MemoryKind::kPinned, static_cast<size_t>(from_bytes), "operands");
  if (!staged.ok()) {
    status_ = staged.status();
    return;
  }
  std::memcpy(staged->data(), from, static_cast<size_t>(from_bytes));
  for (int64_t at = 0; at < bytes; at += from_bytes) {
    stream_->Copy(static_cast<char*>(to) + at, staged->data(),
                  static_cast<size_t>(std::min(from_bytes, bytes - at)));
  }
  const std::unique_ptr<Event> done = device_.NewEvent();
  stream_->Record(*done);
  done->Wait();
}

void* DeviceOperands::RandomBf16(MemoryKind kind, int64_t bytes) {
  void* const data = Room(kind, bytes);
  std::vector<uint16_t> values(static_cast<size_t>(std::min(bytes, kDifferent) / 2));
  for (uint16_t& v : values) {
    const uint32_t bits = random_();
    v = static_cast<uint16_t>((bits & 0x80FFu) | 0x3F00u);  // 0.5 to 2
  }
  Fill(data, bytes, values.data(), static_cast<int64_t>(values.size()) * 2);
  return data;
}

void* DeviceOperands::RandomE4M3(MemoryKind kind, int64_t bytes) {
  void* const data = Room(kind, bytes);
  std::vector<uint8_t> values(static_cast<size_t>(std::min(bytes, kDifferent)));
  for (uint8_t& v : values) v = static_cast<uint8_t>(random_() & 0xB7u);  // Up to 1.9.
  Fill(data, bytes, values.data(), static_cast<int64_t>(values.size()));
  return data;
}

void* DeviceOperands::Activations(int64_t count) {
  const int64_t bytes = count * SizeOf(device_.kernels().activation_type());
  void* const data = Room(MemoryKind::kDevice, bytes);
  const std::vector<uint8_t> zeros(static_cast<size_t>(std::min(bytes, kDifferent)));
  Fill(data, bytes, zeros.data(), static_cast<int64_t>(zeros.size()));
  return data;
}

}  // namespace sluice::bench
