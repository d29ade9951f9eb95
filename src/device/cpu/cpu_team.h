// A fixed team of threads that runs one operator at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/kernel_table.h"

namespace sluice {

class CpuTeam {
 public:
  explicit CpuTeam(int threads);
  ~CpuTeam();
  int threads() const { return threads_; }

  // Calls run(work, {i, workers}) for every i in [0, workers), the last share on the calling
  // thread, and returns when all are done. REQUIRES: workers <= threads().
  using RunFn = void (*)(const void* work, kernels::Worker worker);
  void Run(RunFn run, const void* work, int workers);

 private:
  void HelperLoop(int index);

  const int threads_;
  absl::Mutex run_mutex_;  // one operator at a time, even with several compute streams
  // The job, which epoch_ publishes.
  RunFn run_ = nullptr;
  const void* work_ = nullptr;
  int workers_ = 0;
  bool stop_ = false;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> busy_{0};  // helpers that have not finished this epoch
  std::vector<std::thread> helpers_;
};

}  // namespace sluice
