#include "src/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/str_join.h"
#include "src/base/failpoint.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are used as stored");

using nlohmann::json;

// The format's own limit on the header.
constexpr uint64_t kMaxHeaderBytes = 100ull << 20;
constexpr size_t kMaxDimensions = 16;
constexpr uint64_t kSizeBytes = 8;

struct TypeRow {
  TensorType type;
  const char* name;
  int bytes;
};
constexpr TypeRow kTypes[] = {
    {TensorType::kBool, "BOOL", 1},      {TensorType::kU8, "U8", 1},
    {TensorType::kI8, "I8", 1},          {TensorType::kF8E4M3, "F8_E4M3", 1},
    {TensorType::kF8E5M2, "F8_E5M2", 1}, {TensorType::kI16, "I16", 2},
    {TensorType::kU16, "U16", 2},        {TensorType::kF16, "F16", 2},
    {TensorType::kBF16, "BF16", 2},      {TensorType::kI32, "I32", 4},
    {TensorType::kU32, "U32", 4},        {TensorType::kF32, "F32", 4},
    {TensorType::kI64, "I64", 8},        {TensorType::kU64, "U64", 8},
    {TensorType::kF64, "F64", 8}};

const TypeRow& Row(TensorType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row;
  }
  SLUICE_CHECK(false, "tensor type ", static_cast<int>(type));
}

template <typename... Parts>
absl::Status Broken(const std::string& where, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", parts...));
}

// Sets a number in [0, 2^63) from `value`, or returns false.
bool AsSize(const json& value, uint64_t* out) {
  if (!value.is_number_unsigned()) return false;
  *out = value.get<uint64_t>();
  return *out <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

// Reads one entry of the header. `where` is "FILE: tensor NAME"; `data` is the file's bytes after
// the header, and there are `data_bytes` of them.
absl::Status ParseTensor(const std::string& where, const json& entry, uint64_t data_bytes,
                         TensorInfo* out) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets")) {
    return Broken(where, "expected {dtype, shape, data_offsets}, found ",
                  entry.is_object() ? "an object without one of them" : entry.type_name());
  }
  const json& dtype = entry["dtype"];
  const TypeRow* row = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeRow& r) {
    return dtype.is_string() && dtype.get_ref<const std::string&>() == r.name;
  });
  if (row == std::end(kTypes)) {
    return Broken(where, "unknown dtype ", ShownJson(dtype), ", expected BF16, F16 or F32");
  }
  out->type = row->type;

  const json& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return Broken(where, "shape must be a list of at most ", kMaxDimensions, " sizes");
  }
  uint64_t bytes = static_cast<uint64_t>(row->bytes);
  for (const json& value : shape) {
    uint64_t dim = 0;
    if (!AsSize(value, &dim)) return Broken(where, "shape has no size ", ShownJson(value));
    if (__builtin_mul_overflow(bytes, dim, &bytes)) {
      return Broken(where, "shape ", ShownJson(shape), " is too large for any file");
    }
    out->shape.push_back(static_cast<int64_t>(dim));
  }

  const json& offsets = entry["data_offsets"];
  uint64_t begin = 0, end = 0;
  if (!offsets.is_array() || offsets.size() != 2 || !AsSize(offsets[0], &begin) ||
      !AsSize(offsets[1], &end) || begin > end) {
    return Broken(where, "data_offsets must be [begin, end] with 0 <= begin <= end, found ",
                  ShownJson(offsets));
  }
  if (end > data_bytes) {
    return Broken(where, "data_offsets ", ShownJson(offsets), " lie outside the file, which holds ",
                  data_bytes, " bytes of data: the file is truncated or damaged");
  }
  if (end - begin != bytes) {
    return Broken(where, "data_offsets ", ShownJson(offsets), " span ", end - begin, " bytes, but ",
                  row->name, " ", ShapeText(out->shape), " needs ", bytes);
  }
  out->offset = begin;
  out->bytes = bytes;
  return absl::OkStatus();
}

// Checks that tensors follow each other without overlap or hole, from the first byte of data to the
// last.
absl::Status CheckCover(const std::string& path, const std::map<std::string, TensorInfo>& tensors,
                        uint64_t data_bytes) {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, tensor] : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->offset, a->bytes) < std::pair(b->offset, b->bytes);
  });
  uint64_t end = 0;
  const TensorInfo* last = nullptr;
  for (const TensorInfo* t : order) {
    if (t->offset < end) {
      return Broken(path, "tensors ", Shown(last->name), " and ", Shown(t->name),
                    " overlap: one ends at byte ", end, " of the data, the other begins at ",
                    t->offset);
    }
    if (t->offset > end) {
      return Broken(path, "bytes [", end, ", ", t->offset, ") of the data before tensor ",
                    Shown(t->name), " belong to no tensor");
    }
    end = t->offset + t->bytes;
    last = t;
  }
  if (end != data_bytes) {
    return Broken(path, "the last ", data_bytes - end, " bytes belong to no tensor");
  }
  return absl::OkStatus();
}

}  // namespace

int64_t TensorTypeBytes(TensorType type) { return Row(type).bytes; }
const char* TensorTypeName(TensorType type) { return Row(type).name; }

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // With O_NONBLOCK a FIFO opens without a writer, and is then refused.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
  }
  struct stat st {};
  void* base = MAP_FAILED;
  absl::Status status;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    status = Broken(path, "not a regular file");
  } else if (static_cast<uint64_t>(st.st_size) < kSizeBytes) {
    status = Broken(path, "truncated: ", st.st_size, " bytes, too short for the 8 bytes that say ",
                    "how long the header is");
  } else {
    base = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (base == MAP_FAILED) {
      status = absl::ResourceExhaustedError(
          absl::StrCat(path, ": could not be mapped: ", std::strerror(errno)));
    }
  }
  if (!status.ok()) {
    close(fd);
    return status;
  }
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(
      path, fd, static_cast<const uint8_t*>(base), static_cast<uint64_t>(st.st_size)));
  SLUICE_RETURN_IF_ERROR(file->ReadHeader());
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  munmap(const_cast<uint8_t*>(base_), size_);
  close(fd_);
}

absl::Status SafetensorsFile::ReadHeader() {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, base_, kSizeBytes);
  if (SLUICE_FAILPOINT(kWeightsHeader)) header_bytes = ~header_bytes;
  if (header_bytes > kMaxHeaderBytes) {
    return Broken(path_, "the header says that it is ", header_bytes,
                  " bytes long, expected at most ", kMaxHeaderBytes,
                  ": this is no safetensors file");
  }
  if (header_bytes > size_ - kSizeBytes) {
    return Broken(path_, "the header says that it is ", header_bytes, " bytes long, but the file ",
                  "holds only ", size_ - kSizeBytes, " more: it is truncated or damaged");
  }
  const char* text = reinterpret_cast<const char*>(base_ + kSizeBytes);
  SLUICE_ASSIGN_OR_RETURN(
      const json header,
      ParseJsonObject(text, static_cast<int64_t>(header_bytes), absl::StrCat(path_, ": header")));
  const uint64_t data_begin = kSizeBytes + header_bytes;
  const uint64_t data_bytes = size_ - data_begin;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    TensorInfo tensor;
    tensor.name = name;
    SLUICE_RETURN_IF_ERROR(
        ParseTensor(absl::StrCat(path_, ": tensor ", Shown(name)), entry, data_bytes, &tensor));
    tensors_.emplace(name, std::move(tensor));
  }
  SLUICE_RETURN_IF_ERROR(CheckCover(path_, tensors_, data_bytes));
  for (auto& [name, tensor] : tensors_) tensor.offset += data_begin;
  return absl::OkStatus();
}

const TensorInfo* SafetensorsFile::Find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

absl::Status SafetensorsFile::Read(const TensorInfo& tensor, uint64_t begin, uint64_t count,
                                   void* out) const {
  SLUICE_CHECK(begin <= tensor.bytes && count <= tensor.bytes - begin, tensor.name);
  char* to = static_cast<char*>(out);
  while (count > 0) {
    const ssize_t n = SLUICE_FAILPOINT(kWeightsRead)
                          ? 0
                          : pread(fd_, to, count, static_cast<off_t>(tensor.offset + begin));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      return absl::DataLossError(absl::StrCat(
          path_, ": tensor ", tensor.name,
          " could not be read: ", n < 0 ? std::strerror(errno) : "the file got shorter"));
    }
    to += n;
    begin += static_cast<uint64_t>(n);
    count -= static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

void SafetensorsFile::WillNeed(const TensorInfo& tensor, uint64_t begin, uint64_t count) const {
  Advise(tensor.offset + begin, count, MADV_WILLNEED);
}
void SafetensorsFile::DontNeed(const TensorInfo& tensor) const {
  Advise(tensor.offset, tensor.bytes, MADV_DONTNEED);
}

void SafetensorsFile::Advise(uint64_t offset, uint64_t bytes, int advice) const {
  if (bytes == 0) return;
  // The range is rounded outwards to whole pages: the neighbours' bytes on them come back when they
  // are touched.
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = offset / page * page;
  const uint64_t end = offset + bytes;
  // This is only advice. If the kernel does not take it, only memory or time is lost.
  (void)madvise(const_cast<uint8_t*>(base_) + begin, end - begin, advice);
}

}  // namespace sluice
