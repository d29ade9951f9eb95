// Answers how busy a decode node is, as gateways ask it. Thread-safe.
#pragma once

#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/facade/node_info.h"

namespace sluice {

class Counter;
class Engine;
class PagePool;

class DecodeLoad {
 public:
  // All arguments outlive this. `tokens` counts decoded tokens.
  // `hbm`: a pool of each rank that has sequences of its own, all of one size; one at least.
  DecodeLoad(Engine* engine, std::vector<const PagePool*> hbm, const Counter& tokens,
             const Clock* clock);

  // `done` runs on the engine's thread.
  void Ask(std::function<void(const NodeLoad&)> done);

 private:
  double TokensPerSecond();

  Engine* const engine_;
  const std::vector<const PagePool*> hbm_;
  const Counter& tokens_;
  const Clock* const clock_;
  absl::Mutex mutex_;
  absl::Time since_ ABSL_GUARDED_BY(mutex_);
  double counted_ ABSL_GUARDED_BY(mutex_) = 0;
  double rate_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice
