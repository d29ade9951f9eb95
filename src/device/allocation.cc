#include "src/device/allocation.h"

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

namespace {

absl::StatusOr<Buffer> UploadedBytes(Device* device, const void* values, size_t bytes,
                                     const std::string& purpose) {
  SLUICE_ASSIGN_OR_RETURN(Buffer target, device->Allocate(MemoryKind::kDevice, bytes, purpose));
  SLUICE_ASSIGN_OR_RETURN(Buffer staged, device->Allocate(MemoryKind::kPinned, bytes, purpose));
  std::memcpy(staged.data(), values, bytes);
  const std::unique_ptr<Stream> stream = device->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = device->NewEvent();
  stream->Copy(target.data(), staged.data(), bytes);
  stream->Record(*done);
  done->Wait();
  SLUICE_RETURN_IF_ERROR(device->Health());
  return target;
}

}  // namespace

absl::StatusOr<Buffer> Uploaded(Device* device, absl::Span<const float> values,
                                const std::string& purpose) {
  return UploadedBytes(device, values.data(), values.size() * sizeof(float), purpose);
}
absl::StatusOr<Buffer> Uploaded(Device* device, absl::Span<const int32_t> values,
                                const std::string& purpose) {
  return UploadedBytes(device, values.data(), values.size() * sizeof(int32_t), purpose);
}

BufferAllocator::BufferAllocator(Device* device, std::string purpose)
    : device_(device), purpose_(std::move(purpose)) {}

absl::Status BufferAllocator::Array(MemoryKind kind, int64_t count, int64_t element_bytes,
                                    Buffer* buffer) const {
  int64_t bytes = 0;
  if (count < 0 || element_bytes < 0 || __builtin_mul_overflow(count, element_bytes, &bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat(purpose_, ": ", count, " elements of ",
                                                     element_bytes,
                                                     " bytes are more than any memory holds"));
  }
  SLUICE_ASSIGN_OR_RETURN(*buffer, device_->Allocate(kind, static_cast<size_t>(bytes), purpose_));
  return absl::OkStatus();
}

absl::Status BufferAllocator::MirroredWords(int64_t words, MirroredBuffer* both) const {
  SLUICE_RETURN_IF_ERROR(Words(MemoryKind::kDevice, words, &both->device));
  return Words(MemoryKind::kPinned, words, &both->host);
}

}  // namespace sluice
