#include "src/device/cpu/cpu_team.h"

#include "src/base/status_macros.h"
#include "src/device/cpu/spin_wait.h"

namespace sluice {

CpuTeam::CpuTeam(int threads) : threads_(threads) {
  SLUICE_CHECK(threads >= 1);
  for (int i = 0; i + 1 < threads; ++i) helpers_.emplace_back([this, i] { HelperLoop(i); });
}

CpuTeam::~CpuTeam() {
  stop_ = true;
  StoreAndNotify(epoch_, epoch_.load(std::memory_order_relaxed) + 1);
  for (std::thread& helper : helpers_) helper.join();
}

void CpuTeam::Run(RunFn run, const void* work, int workers) {
  SLUICE_CHECK(workers >= 1 && workers <= threads_);
  if (workers == 1) {
    run(work, {0, 1});
    return;
  }
  absl::MutexLock lock(&run_mutex_);
  run_ = run;
  work_ = work;
  workers_ = workers;
  busy_.store(static_cast<uint32_t>(helpers_.size()), std::memory_order_relaxed);
  StoreAndNotify(epoch_, epoch_.load(std::memory_order_relaxed) + 1);
  run(work, {workers - 1, workers});
  for (uint32_t busy = busy_.load(std::memory_order_acquire); busy != 0;
       busy = busy_.load(std::memory_order_acquire)) {
    WaitWhileEqual(busy_, busy);
  }
}

void CpuTeam::HelperLoop(int index) {
  for (uint32_t seen = 0;;) {
    WaitWhileEqual(epoch_, seen);
    // No epoch is missed: Run() starts no second epoch before every helper has finished the first.
    ++seen;
    if (stop_) return;
    if (index < workers_ - 1) run_(work_, {index, workers_});
    if (busy_.fetch_sub(1, std::memory_order_seq_cst) == 1) busy_.notify_all();
  }
}

}  // namespace sluice
