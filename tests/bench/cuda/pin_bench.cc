// Measures how long the pinned pool takes to make.
//
//   sluice-pin-bench [GIB...]
//
// It prints a line for each size. Without a size it makes 64 GiB, twice: a virtual machine's
// first touch of memory may have to wait for its host.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "src/device/cuda/cuda_device.h"

int main(int argc, char** argv) {
  const auto device = sluice::NewCudaDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  std::vector<double> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atof(argv[i]));
  if (sizes.empty()) sizes = {64, 64};
  for (const double gib : sizes) {
    const auto start = Clock::now();
    auto buffer = (*device)->Allocate(sluice::MemoryKind::kPinned,
                                      static_cast<size_t>(gib * (1 << 30)), "the benchmark");
    if (!buffer.ok()) {
      std::fprintf(stderr, "%s\n", std::string(buffer.status().message()).c_str());
      return 1;
    }
    const double pinned = seconds(start);
    const auto back = Clock::now();
    *buffer = sluice::Buffer();
    std::printf("%8.2f GiB: pinned in %.2f s, given back in %.2f s; %u cores\n", gib, pinned,
                seconds(back), std::thread::hardware_concurrency());
  }
  return 0;
}
