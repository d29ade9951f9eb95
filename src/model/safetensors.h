// Reads safetensors files (https://github.com/huggingface/safetensors): an 8-byte little-endian
// header size, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes. A file
// is mapped and its header checked once; after that every tensor is known to lie inside the file.
//
// Opened files are immutable, so any thread may read them. Bytes are paged in as they are touched.
// The file must not be shortened while it is open.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

enum class TensorType {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64
};

int64_t TensorTypeBytes(TensorType type);
// Returns the type as the format spells it: "BF16".
const char* TensorTypeName(TensorType type);

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kBF16;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // from the file's start to the first byte
  uint64_t bytes = 0;   // elements * TensorTypeBytes(type)

  int64_t elements() const { return static_cast<int64_t>(bytes) / TensorTypeBytes(type); }
};

// Returns text for messages: "[3, 4]".
std::string ShapeText(absl::Span<const int64_t> shape);

class SafetensorsFile {
 public:
  // Opens a file. NOT_FOUND if there is no such file. INVALID_ARGUMENT, which names the file and,
  // if it is one tensor's fault, the tensor, if the file is shorter than its header says, has a
  // header over 100 MiB or one that is not a JSON object, an unknown dtype, a shape and offsets
  // that disagree, offsets outside the file, tensors that overlap, or bytes that belong to no
  // tensor.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // Returns the tensors by name.
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  // Returns null if there is no tensor of that name.
  const TensorInfo* Find(const std::string& name) const;
  // Returns the mapped bytes of one of this file's tensors, row-major and little-endian.
  const uint8_t* Data(const TensorInfo& tensor) const { return base_ + tensor.offset; }
  // Copies `count` bytes from `begin` of the tensor without touching the mapping, so that looking
  // at a few bytes of a large file leaves nothing resident. REQUIRES: the range lies inside the
  // tensor.
  absl::Status Read(const TensorInfo& tensor, uint64_t begin, uint64_t count, void* out) const;
  // Tells the kernel that the tensor's bytes will be read soon, or that they will not. In the
  // latter case its pages leave this process (not the page cache), and a later read pages them in
  // again.
  void WillNeed(const TensorInfo& tensor) const { WillNeed(tensor, 0, tensor.bytes); }
  // The same of bytes [begin, begin + count) of the tensor.
  void WillNeed(const TensorInfo& tensor, uint64_t begin, uint64_t count) const;
  void DontNeed(const TensorInfo& tensor) const;

 private:
  SafetensorsFile(std::string path, int fd, const uint8_t* base, uint64_t size)
      : path_(std::move(path)), fd_(fd), base_(base), size_(size) {}
  absl::Status ReadHeader();
  void Advise(uint64_t offset, uint64_t bytes, int advice) const;

  const std::string path_;
  const int fd_;
  const uint8_t* const base_;
  const uint64_t size_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace sluice
