#include "src/device/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/cpu_topology.h"
#include "src/device/cuda/cuda_machine.h"

namespace sluice {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kTouchedPerThread = size_t{64} << 20;

std::string Bytes(size_t bytes) {
  return absl::StrFormat("%d bytes (%.2f GiB)", bytes,
                         static_cast<double>(bytes) / (size_t{1} << 30));
}

// Makes the system give every page of [data, data + bytes), zeroed.
void Touch(uint8_t* data, size_t bytes, size_t page) {
  for (size_t at = 0; at < bytes; at += page) data[at] = 0;
}

// Touches with threads that run on `cpus`, if there are any: by default the system takes memory
// from the node of the thread that touches it.
void TouchInParallel(uint8_t* data, size_t bytes, size_t page, absl::Span<const int> cpus) {
  const size_t cores =
      cpus.empty() ? std::max(1u, std::thread::hardware_concurrency()) : cpus.size();
  const size_t threads = std::clamp<size_t>(bytes / kTouchedPerThread, 1, cores);
  // Each thread takes whole huge pages, so that no two threads fault on one.
  const size_t share = (bytes / threads + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<std::jthread> helpers;
  for (size_t begin = 0; begin < bytes; begin += share) {
    helpers.emplace_back([=] {
      // A thread that cannot be moved touches all the same; then PreferNode decides.
      if (!cpus.empty()) PinThisThread(cpus).IgnoreError();
      Touch(data + begin, std::min(share, bytes - begin), page);
    });
  }
}

void PreferGpuNode(uint8_t* data, size_t bytes) {
  const HostPlacement& placement = GpuPlacement();
  if (placement.node < 0) return;
  const absl::Status preferred = PreferNode(data, bytes, placement.node);
  static std::atomic<bool> logged = false;
  if (!preferred.ok() && !logged.exchange(true)) {
    Log(LogLevel::kInfo,
        "pinned memory is not bound to the GPU's NUMA node, only the threads that touch it are",
        {{"placement", DescribePlacement(placement)}, {"error", preferred.ToString()}});
  }
}

absl::Status NoMemory(size_t bytes, const std::string& what, const char* why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no pinned memory for ", what, ": ", Bytes(bytes), " were asked for (", why,
                   "); ask for less, or raise the limit of locked memory"));
}

absl::Status Register(void* data, size_t bytes, const std::string& what) {
  const cudaError_t error =
      cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // clears the error, which is returned below
  return NoMemory(bytes, what, cudaGetErrorString(error));
}

// A mapping that is registered with CUDA.
class PinnedMapping {
 public:
  PinnedMapping() = default;
  PinnedMapping(const PinnedMapping&) = delete;
  PinnedMapping& operator=(const PinnedMapping&) = delete;
  ~PinnedMapping() {
    if (registered_) cudaHostUnregister(data_);
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }

  absl::Status Map(size_t bytes, const std::string& what) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t rounded = (bytes + page - 1) / page * page;
    const bool huge = rounded >= kHugePage;
    mapped_bytes_ = huge ? rounded + kHugePage : rounded;
    void* mapped =
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NoMemory(bytes, what, std::strerror(errno));
    mapped_ = data_ = static_cast<uint8_t*>(mapped);
    if (huge) {
      const auto past = reinterpret_cast<uintptr_t>(mapped_) % kHugePage;
      data_ += past == 0 ? 0 : kHugePage - past;
      madvise(data_, rounded, MADV_HUGEPAGE);  // advice that may be refused
    }
    PreferGpuNode(data_, rounded);
    TouchInParallel(data_, rounded, page, GpuPlacement().cpus);
    // The memory is registered in one piece: a copy may not cross two, and pieces of 1 GiB are
    // registered no faster.
    SLUICE_RETURN_IF_ERROR(Register(data_, rounded, what));
    registered_ = true;
    return absl::OkStatus();
  }

  void* data() const { return data_; }

 private:
  uint8_t* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
  bool registered_ = false;
};

}  // namespace

absl::StatusOr<Buffer> AllocateHbm(size_t bytes, const std::string& what) {
  if (bytes == 0) return Buffer();
  void* data = nullptr;
  cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which is returned below
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for ", what, ": ", Bytes(bytes), " were asked for, and of the GPU's ",
        Bytes(total), " ", Bytes(free),
        " are free; lower --hbm-bytes, --max-context or --chunk-tokens (for sluice-server also "
        "--max-sequences; its --print-plan adds up what is needed)"));
  }
  if (error == cudaSuccess) {
    error = cudaMemsetAsync(data, 0, bytes, cudaStreamPerThread);
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamPerThread);
  }
  if (error != cudaSuccess) {
    return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
  }
  return Buffer(data, bytes, [](void* memory, size_t) { cudaFree(memory); });
}

absl::StatusOr<Buffer> AllocatePinned(size_t bytes, const std::string& what) {
  if (bytes == 0) return Buffer();
  // shared because a std::function must be copyable
  auto mapping = std::make_shared<PinnedMapping>();
  SLUICE_RETURN_IF_ERROR(mapping->Map(bytes, what));
  void* const data = mapping->data();
  return Buffer(data, bytes,
                [mapping = std::move(mapping)](void*, size_t) mutable { mapping.reset(); });
}

absl::StatusOr<Buffer> PinMapped(void* data, size_t bytes, const std::string& what) {
  SLUICE_RETURN_IF_ERROR(Register(data, bytes, what));
  return Buffer(data, bytes, [](void* begin, size_t) { cudaHostUnregister(begin); });
}

}  // namespace sluice
