#include "src/device/cuda/cuda_device.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/launch.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_kernel_set.h"
#include "src/device/cuda/cuda_machine.h"
#include "src/device/cuda/cuda_mailbox.h"
#include "src/device/cuda/cuda_memory.h"
#include "src/device/cuda/cuda_program.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/cupti_trace.h"
#include "src/device/cuda/nccl_rank_group.h"
#include "src/device/device_health.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"
#include "src/device/worker_team.h"

namespace sluice {
namespace {

// Numbers of decode rows that have a program of their own: close together where another row costs
// most, then steps of a tensor core's tile.
constexpr int kSmallBuckets[] = {1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128};
constexpr int kBucketStep = 32;
constexpr int kLargestBucket = 512;

class CudaDevice : public Device {
 public:
  CudaDevice() : kernels_(NewCudaKernelSet(&health_)) {}

  const std::string& name() const override { return name_; }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string& what) override {
    if (SLUICE_FAILPOINT(kDeviceAllocate)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", what, ": ", bytes, " bytes were asked for (failpoint)"));
    }
    return kind == MemoryKind::kDevice ? AllocateHbm(bytes, what) : AllocatePinned(bytes, what);
  }
  absl::StatusOr<Buffer> Pin(void* data, size_t bytes, const std::string& what) override {
    return PinMapped(data, bytes, what);
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override {
    return std::make_unique<CudaStream>(&health_, kind);
  }
  std::unique_ptr<Event> NewEvent() override {
    return std::make_unique<CudaEvent>(&health_, /*timed=*/false);
  }
  std::unique_ptr<TimedEvent> NewTimedEvent() override {
    return std::make_unique<CudaEvent>(&health_, /*timed=*/true);
  }
  KernelSet& kernels() override { return *kernels_; }
  absl::StatusOr<std::unique_ptr<DeviceTrace>> StartTrace() override { return StartCuptiTrace(); }

  absl::StatusOr<std::unique_ptr<Program>> Record(Stream& stream,
                                                  std::function<void(Stream&)> enqueue) override {
    return RecordCudaProgram(static_cast<CudaStream&>(stream), enqueue);
  }

  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) override {
    SLUICE_RETURN_IF_ERROR(Mailbox::CheckOptions(options));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer pinned, Allocate(MemoryKind::kPinned, Mailbox::PinnedBytes(options), "a mailbox"));
    return NewCudaMailbox(std::move(pinned), options);
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(const WorkerTeamOptions& options,
                                                            WorkerFn work) override {
    return NewMailboxWorkers(*this, options, std::move(work));
  }
  absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RankGroupOptions& options) override {
    return JoinNcclRanks(options, &health_);
  }
  HostPlacement Placement() const override { return GpuPlacement(); }

  int RowBucket(int rows) const override {
    for (const int bucket : kSmallBuckets) {
      if (rows <= bucket) return bucket;
    }
    return rows <= kLargestBucket ? (rows + kBucketStep - 1) / kBucketStep * kBucketStep : 0;
  }

  int Processors() const override {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return processors;
  }

  DeviceMemory Memory() const override {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
  }

  absl::Status Health() const override {
    if (SLUICE_FAILPOINT(kDeviceFailure)) health_.Fail("failpoint device.failure");
    return health_.status();
  }

 private:
  const std::string name_ = "cuda";
  mutable DeviceHealth health_;
  const std::unique_ptr<KernelSet> kernels_;
};

}  // namespace

absl::Status CheckCudaDevice() {
  SLUICE_RETURN_IF_ERROR(CheckCudaMachine(ProbeCudaMachine()));
  // Prompt rows need cuBLASLt, and every node computes one before it is ready.
  if (!kernels::cuda::HasPromptProducts()) {
    return absl::FailedPreconditionError(
        "device: cuda: there is no libcublasLt.so.13: install cuBLAS of CUDA 13, put it on "
        "LD_LIBRARY_PATH, or run with --device cpu");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Device>> NewCudaDevice() {
  SLUICE_RETURN_IF_ERROR(CheckCudaDevice());
  auto device = std::make_unique<CudaDevice>();
  SLUICE_RETURN_IF_ERROR(device->Health());  // not OK where streams could not be made
  return device;
}

}  // namespace sluice
