// The counters of a sparse policy by layer and slot, in device memory, where operators add to them
// (kernels/sparse_params.h), and their sums. A slot's counters go on from one of its sequences to
// the next.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/policy_statistics.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"

namespace sluice {

class SelectionCounters {
 public:
  // `layout` of one cache kind, K and V. RESOURCE_EXHAUSTED: no memory for them.
  static absl::StatusOr<std::unique_ptr<SelectionCounters>> Create(Device* device, int slots,
                                                                   const CacheLayout& layout);

  // [slots] of a layer.
  kernels::SparseCounters* of(int layer) const {
    return device_.as<kernels::SparseCounters>() + int64_t{layer} * slots_;
  }
  // Waits for the device's copy of them. REQUIRES: no step is under way.
  PolicyStatistics Sum() const;

  // A look while steps go on. PollCounters enqueues a copy of them on the steps' own stream,
  // between two steps; nothing where a look is under way. Take gives its sums, once, when the copy
  // is done; till then, and where there is none, it returns false. One thread.
  void PollCounters(Stream& stream);
  bool Take(PolicyStatistics* sums);

 private:
  SelectionCounters(Device* device, int slots, const CacheLayout& layout, Buffer on_device,
                    Buffer on_host, Buffer looked);
  void SumOf(const Buffer& host, PolicyStatistics* sums) const;

  const int slots_;
  const CacheLayout layout_;
  const Buffer device_, host_;  // SparseCounters [layers][slots]
  const Buffer looked_;         // the same, of a look
  const std::unique_ptr<Event> look_done_;
  bool looking_ = false;
  const std::unique_ptr<Event> copied_;
  const std::unique_ptr<Stream> stream_;
};

}  // namespace sluice
