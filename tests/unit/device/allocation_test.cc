#include "src/device/allocation.h"

#include <catch2/catch.hpp>
#include <limits>

#include "src/device/cpu/cpu_device.h"

namespace sluice {

TEST_CASE("arrays have the bytes that were asked for, in both memories where they are mirrored") {
  const auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  const BufferAllocator allocator(device->get(), "test");
  Buffer buffer;
  REQUIRE(allocator.Array(MemoryKind::kPinned, 7, 3, &buffer).ok());
  CHECK(buffer.bytes() == 21);
  REQUIRE(allocator.Words(MemoryKind::kDevice, 5, &buffer).ok());
  CHECK(buffer.bytes() == 20);
  MirroredBuffer both;
  REQUIRE(allocator.MirroredWords(6, &both).ok());
  CHECK(both.device.bytes() == 24);
  CHECK(both.host.bytes() == 24);
}

TEST_CASE("a size that does not fit is refused with its purpose, and the buffer stays") {
  const auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  const BufferAllocator allocator(device->get(), "lists of tests");
  Buffer buffer;
  REQUIRE(allocator.Words(MemoryKind::kPinned, 5, &buffer).ok());
  for (const int64_t count : {int64_t{-1}, std::numeric_limits<int64_t>::max() / 2}) {
    const absl::Status status = allocator.Words(MemoryKind::kPinned, count, &buffer);
    CHECK(absl::IsResourceExhausted(status));
    CHECK(status.message().find("lists of tests") != std::string::npos);
    CHECK(buffer.bytes() == 20);
  }
}

}  // namespace sluice
