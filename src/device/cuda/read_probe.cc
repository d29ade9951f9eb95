#include "src/device/cuda/read_probe.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/common/launch.h"

namespace sluice {
namespace {

constexpr int kRounds = 9;
// Minimum launches in a round: the latency of its first launch is not hidden.
constexpr int kLeastLaunches = 8;

// Frees the resources of a measurement on every path.
struct Probe {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  uint32_t* never = nullptr;
  ~Probe() {
    cudaFree(never);
    if (end != nullptr) cudaEventDestroy(end);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  bool Make() {
    return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
           cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess &&
           cudaMalloc(reinterpret_cast<void**>(&never), sizeof(*never)) == cudaSuccess;
  }
};

}  // namespace

double CudaReadRate(const void* data, size_t window, size_t bytes) {
  constexpr size_t kVector = 16;
  Probe probe;
  if (!probe.Make()) return 0;
  // Each launch reads the next piece of the window.
  const size_t piece = std::min(bytes, window) / kVector * kVector;
  const size_t pieces = window / piece;
  const size_t launches = std::max<size_t>((bytes + piece - 1) / piece, kLeastLaunches);
  std::vector<float> milliseconds;
  for (int round = 0; round <= kRounds; ++round) {  // The first round does not count.
    float ms = 0;
    bool ok = cudaEventRecord(probe.begin, probe.stream) == cudaSuccess;
    for (size_t i = 0; i < launches && ok; ++i) {
      ok = kernels::cuda::LaunchReadProbe(static_cast<const uint8_t*>(data) + i % pieces * piece,
                                          static_cast<int64_t>(piece), probe.never,
                                          probe.stream) == cudaSuccess;
    }
    ok = ok && cudaEventRecord(probe.end, probe.stream) == cudaSuccess &&
         cudaEventSynchronize(probe.end) == cudaSuccess &&
         cudaEventElapsedTime(&ms, probe.begin, probe.end) == cudaSuccess;
    if (!ok) return 0;
    if (round > 0) milliseconds.push_back(ms);
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  return static_cast<double>(piece * launches) /
         (static_cast<double>(milliseconds[milliseconds.size() / 2]) * 1e-3);
}

std::string CudaGpuName() {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess ? properties.name : "unknown";
}

}  // namespace sluice
