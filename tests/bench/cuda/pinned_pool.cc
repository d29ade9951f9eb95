#include "tests/bench/cuda/pinned_pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "src/device/cuda/cuda_memory.h"

namespace sluice::bench {

PinnedPool::PinnedPool(size_t bytes) : bytes_(bytes) {
  const auto start = std::chrono::steady_clock::now();
  auto buffer = AllocatePinned(bytes, "the benchmark's pool");
  if (!buffer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(buffer.status().message()).c_str());
    std::exit(1);
  }
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  data_ = buffer->as<char>();
  memory_ = std::make_shared<Buffer>(*std::move(buffer));
}

}  // namespace sluice::bench
