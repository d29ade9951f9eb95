#include "src/attention/policies/hgca/selection_thread.h"

#include <chrono>

namespace sluice {
namespace {

// A block's averages arrive within a step; a late check costs a worker's time.
constexpr std::chrono::microseconds kLookAgain{200};

}  // namespace

SelectionThread::SelectionThread(ContextualCache* cache)
    : cache_(cache), thread_([this] { Loop(); }) {}

SelectionThread::~SelectionThread() {
  stop_.store(true, std::memory_order_relaxed);
  cache_->Wake();
  thread_.join();
}

void SelectionThread::Loop() {
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint32_t seen = cache_->work();
    if (cache_->SelectAhead()) {
      std::this_thread::sleep_for(kLookAgain);
    } else {
      cache_->WaitForWork(seen);
    }
  }
}

}  // namespace sluice
