#include "src/device/cuda/cuda_machine.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/logging.h"
#include "src/device/cpu_topology.h"

namespace sluice {
namespace {

constexpr int kMajor = 9;  // the kernels are compiled for sm_90a alone
constexpr char kElse[] = ", or run with --device cpu";

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status Lacks(const std::string& found, const std::string& remedy) {
  return absl::FailedPreconditionError(absl::StrCat("device: cuda: ", found, ": ", remedy, kElse));
}

}  // namespace

CudaMachine ProbeCudaMachine() {
  // CUDA has eight queues by default, and 32 at most, among which it divides the streams. A stream
  // that waits for something holds up every other stream of its queue. With eight, four links that
  // wait for other nodes hold up all streams of a step on an H200 (sluice-queues-bench).
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  CudaMachine machine;
  cudaDriverGetVersion(&machine.driver_version);
  cudaRuntimeGetVersion(&machine.runtime_version);
  if (const cudaError_t error = cudaGetDeviceCount(&machine.gpus); error != cudaSuccess) {
    machine.gpus = 0;
    if (error != cudaErrorNoDevice) machine.error = cudaGetErrorString(error);
    cudaGetLastError();  // clears the error, which is handled here
  }
  if (machine.gpus == 0) return machine;
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, 0); error != cudaSuccess) {
    machine.error = cudaGetErrorString(error);
    return machine;
  }
  machine.gpu = properties.name;
  machine.major = properties.major;
  machine.minor = properties.minor;
  return machine;
}

absl::Status CheckCudaMachine(const CudaMachine& machine) {
  const std::string needed = VersionText(machine.runtime_version);
  if (machine.driver_version == 0) {
    return Lacks("this machine has no NVIDIA driver",
                 absl::StrCat("install one that supports CUDA ", needed));
  }
  // A driver serves every release of its own major version, and those before.
  if (machine.driver_version / 1000 < machine.runtime_version / 1000) {
    return Lacks(
        absl::StrCat("the NVIDIA driver supports CUDA up to ", VersionText(machine.driver_version),
                     ", and this build needs ", needed),
        "install a newer driver");
  }
  if (!machine.error.empty()) {
    return Lacks(absl::StrCat("the NVIDIA driver refused: ", machine.error),
                 "see what nvidia-smi says");
  }
  if (machine.gpus == 0) {
    return Lacks("the driver shows no GPU", "see nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (machine.major != kMajor) {
    return Lacks(
        absl::StrCat("the GPU is an ", machine.gpu, " of compute capability ", machine.major, ".",
                     machine.minor, ", and this build's kernels need 9.0 (H100, H200)"),
        "choose another GPU by CUDA_VISIBLE_DEVICES");
  }
  return absl::OkStatus();
}

const HostPlacement& GpuPlacement() {
  static const HostPlacement placement = [] {
    char bus_id[32] = {};
    if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), 0) != cudaSuccess) cudaGetLastError();
    std::vector<int> usable;
    for (const Cpu& cpu : UsableCpus()) usable.push_back(cpu.id);
    HostPlacement found = PlacementOfPciDevice(bus_id, usable);
    if (found.nodes > 1 && found.node < 0) {
      Log(LogLevel::kInfo,
          "the GPU's NUMA node is unknown: pinned memory and workers may be on any node",
          {{"bus_id", std::string(bus_id)}, {"nodes", found.nodes}});
    }
    return found;
  }();
  return placement;
}

}  // namespace sluice
