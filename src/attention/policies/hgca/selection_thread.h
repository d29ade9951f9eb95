// The thread that selects tokens beside the steps (HGCA, section 3.2.2: "an asynchronous CPU-side
// sparsification thread").
#pragma once

#include <atomic>
#include <thread>

#include "src/attention/policies/hgca/contextual_cache.h"

namespace sluice {

class SelectionThread {
 public:
  // `cache` outlives it.
  explicit SelectionThread(ContextualCache* cache);
  ~SelectionThread();
  SelectionThread(const SelectionThread&) = delete;
  SelectionThread& operator=(const SelectionThread&) = delete;

 private:
  void Loop();

  ContextualCache* const cache_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace sluice
