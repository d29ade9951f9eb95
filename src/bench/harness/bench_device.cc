#include "src/bench/harness/bench_device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/base/timing.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/kernel_set.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_device.h"
#include "src/device/cuda/read_probe.h"
#endif

namespace sluice::bench {
namespace {

constexpr double kProbeSeconds = 0.15;

class CpuBenchDevice : public BenchDevice {
 public:
  CpuBenchDevice(std::unique_ptr<Device> device, int threads)
      : device_(std::move(device)), threads_(threads) {}
  Device& device() override { return *device_; }
  std::vector<std::pair<std::string, std::string>> Shape() const override {
    return {{"kernels", device_->kernels().name()}, {"threads", absl::StrCat(threads_)}};
  }
  absl::StatusOr<double> ReadRate(size_t bytes) override {
    // The buffer is kept, so that a step that is measured again is compared with the same memory.
    if (buffer_ == nullptr || buffer_->bytes() < bytes) {
      buffer_ = std::make_unique<HugeBuffer>(bytes);
    }
    Crew crew(threads_);
    return static_cast<double>(bytes) / MeasureRead(crew, *buffer_, bytes, kProbeSeconds).median;
  }

 private:
  const std::unique_ptr<Device> device_;
  const int threads_;
  std::unique_ptr<HugeBuffer> buffer_;
};

#ifdef SLUICE_HAVE_CUDA
class CudaBenchDevice : public BenchDevice {
 public:
  explicit CudaBenchDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}
  Device& device() override { return *device_; }
  std::vector<std::pair<std::string, std::string>> Shape() const override {
    return {{"gpu", CudaGpuName()}, {"kernels", device_->kernels().name()}};
  }
  absl::StatusOr<double> ReadRate(size_t bytes) override {
    // The window is far larger than the L2 (50 MB) and is read piece after piece, so that the probe
    // does not take as much memory as the model.
    constexpr size_t kWindow = size_t{1} << 30;
    if (buffer_.data() == nullptr) {
      SLUICE_ASSIGN_OR_RETURN(buffer_,
                              device_->Allocate(MemoryKind::kDevice, kWindow, "the read probe"));
    }
    const double rate = CudaReadRate(buffer_.data(), kWindow, bytes);
    if (rate <= 0) return absl::InternalError("the read probe did not run");
    return rate;
  }

 private:
  const std::unique_ptr<Device> device_;
  Buffer buffer_;
};
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<BenchDevice>> BenchDevice::Create(const Options& options) {
  if (options.name == "cpu") {
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                            NewCpuDevice({options.kernels, options.threads}));
    return std::make_unique<CpuBenchDevice>(std::move(device), options.threads);
  }
#ifdef SLUICE_HAVE_CUDA
  if (options.name == "cuda") {
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, NewCudaDevice());
    return std::make_unique<CudaBenchDevice>(std::move(device));
  }
#endif
  return absl::InvalidArgumentError(absl::StrCat("--device: this build has no ", options.name));
}

absl::StatusOr<DeviceRates> BenchDevice::MeasureRates(int workers) {
  // Larger than any cache. On the CPU device all memory is the host's.
  const bool gpu = device().Memory().total_bytes > 0;
  const size_t bytes = gpu ? size_t{1} << 30 : size_t{128} << 20;
  RateOptions options;
  options.workers = workers;
  options.device_bytes = gpu ? 8 * bytes : bytes;
  options.link_bytes = bytes / 4;
  options.dram_bytes = 2 * bytes;
  options.read_seconds = 0.3;
  options.read_device = [this](size_t read) { return ReadRate(read); };
  return MeasureDeviceRates(device(), options);
}

}  // namespace sluice::bench
