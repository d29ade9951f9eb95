// Spreads the work of loading a model over the host's cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice {

// Calls work(i) once for every i in [0, count), on as many threads as there are cores, in no order.
inline void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t i)> work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> threads;
  for (int64_t i = 1; i < std::min<int64_t>(count, AvailableCores()); ++i) {
    threads.emplace_back(run);
  }
  run();
}

// Does the same for ranges [begin, end) of [0, count), each of `step` numbers or less.
inline void ParallelRanges(int64_t count, int64_t step,
                           absl::FunctionRef<void(int64_t begin, int64_t end)> work) {
  ParallelFor((count + step - 1) / step,
              [&](int64_t i) { work(i * step, std::min(count, (i + 1) * step)); });
}

}  // namespace sluice
