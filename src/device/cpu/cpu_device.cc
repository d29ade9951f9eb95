#include "src/device/cpu/cpu_device.h"

#include <sched.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_join.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_kernel_set.h"
#include "src/device/cpu/cpu_mailbox.h"
#include "src/device/cpu/cpu_rank_group.h"
#include "src/device/cpu/cpu_stream.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/cpu/cpu_trace.h"
#include "src/device/device_health.h"
#include "src/device/worker_team.h"

namespace sluice {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

absl::Status NoMemory(size_t bytes, const std::string& what, int error) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "no memory for ", what, ": ", bytes, " bytes were asked for (", std::strerror(error), ")"));
}

// Maps anonymous memory. Large pieces begin on a huge page and ask for huge pages (weights are then
// read at 2-3 x the bandwidth). The system gives the pages on first use.
absl::StatusOr<Buffer> MapMemory(size_t bytes, const std::string& what) {
  if (bytes == 0) return Buffer();
  const bool huge = bytes >= kHugePage;
  const size_t mapped = huge ? bytes + kHugePage : bytes;
  void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) {
    return NoMemory(bytes, what, errno);
  }
  auto* address = static_cast<uint8_t*>(raw);
  if (huge) {
    address += (kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage) % kHugePage;
    madvise(address, bytes, MADV_HUGEPAGE);  // advice that may be refused
  }
  return Buffer(address, bytes, [raw, mapped](void*, size_t) { munmap(raw, mapped); });
}

class CpuDevice : public Device {
 public:
  CpuDevice(const kernels::KernelTable& table, int threads, int row_bucket)
      : row_bucket_(row_bucket), team_(threads), kernels_(NewCpuKernelSet(table, &team_, this)) {}

  const std::string& name() const override { return name_; }
  absl::StatusOr<Buffer> Allocate(MemoryKind, size_t bytes, const std::string& what) override {
    if (SLUICE_FAILPOINT(kDeviceAllocate)) return NoMemory(bytes, what, ENOMEM);
    return MapMemory(bytes, what);
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override {
    return std::make_unique<CpuStream>(kind == StreamKind::kCompute ? &team_ : nullptr, &trace_);
  }
  std::unique_ptr<Event> NewEvent() override { return std::make_unique<CpuEvent>(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return std::make_unique<CpuEvent>(); }
  KernelSet& kernels() override { return *kernels_; }
  absl::StatusOr<std::unique_ptr<DeviceTrace>> StartTrace() override { return trace_.Start(); }
  absl::Status Health() const override {
    if (SLUICE_FAILPOINT(kDeviceFailure)) health_.Fail("failpoint device.failure");
    return health_.status();
  }
  int HostThreads() const override { return team_.threads(); }
  int RowBucket(int rows) const override {
    return row_bucket_ == 0 ? 0 : (rows + row_bucket_ - 1) / row_bucket_ * row_bucket_;
  }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) override {
    SLUICE_RETURN_IF_ERROR(Mailbox::CheckOptions(options));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer pinned, Allocate(MemoryKind::kPinned, Mailbox::PinnedBytes(options), "a mailbox"));
    return NewCpuMailbox(std::move(pinned), options);
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(const WorkerTeamOptions& options,
                                                            WorkerFn work) override {
    return NewMailboxWorkers(*this, options, std::move(work));
  }
  absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RankGroupOptions& options) override {
    return JoinCpuRanks(options, &health_);
  }

 private:
  const std::string name_ = "cpu";
  const int row_bucket_;
  mutable DeviceHealth health_;
  CpuTraceLog trace_;
  CpuTeam team_;
  const std::unique_ptr<KernelSet> kernels_;
};

}  // namespace

int AvailableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

int DefaultThreads() {
  const int cores = AvailableCores();
  return cores >= 4 ? cores - 1 : cores;
}

absl::StatusOr<std::unique_ptr<Device>> NewCpuDevice(const CpuDeviceOptions& options) {
  const kernels::KernelTable* table = options.kernels == "auto"
                                          ? kernels::AvailableKernelTables().back()
                                          : kernels::FindKernelTable(options.kernels.c_str());
  if (table == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kernels: this processor cannot run '", options.kernels, "'; choose one of auto, ",
        absl::StrJoin(kernels::AvailableKernelTables(), ", ",
                      [](std::string* out, const kernels::KernelTable* t) { *out += t->name; })));
  }
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  return std::make_unique<CpuDevice>(*table, threads, options.row_bucket);
}

}  // namespace sluice
