#include "tests/support/device.h"

#include "absl/strings/str_cat.h"
#include "kernels/kernel_table.h"
#include "src/device/cpu/cpu_device.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_device.h"
#endif

namespace sluice::testing {
namespace {

absl::StatusOr<std::unique_ptr<Device>> CudaTestDevice() {
#ifdef SLUICE_HAVE_CUDA
  auto device = NewCudaDevice();
  if (absl::IsFailedPrecondition(device.status())) {
    return absl::NotFoundError(device.status().message());
  }
  return device;
#else
  return absl::NotFoundError("this build has no CUDA");
#endif
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> TestDevice(const std::string& kernels, int threads,
                                                   int row_bucket) {
  if (kernels == "cuda") return CudaTestDevice();
  if (kernels != "auto" && kernels::FindKernelTable(kernels.c_str()) == nullptr) {
    return absl::NotFoundError(absl::StrCat("this processor has no ", kernels));
  }
  return NewCpuDevice({kernels, threads, row_bucket});
}

}  // namespace sluice::testing
