// The counters of a sparse policy by layer and slot, in device memory, where operators add to them
// (kernels/sparse_params.h), and their sums. A slot's counters carry on from one of its sequences
// to the next. Only the engine's thread may call it.
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
  // `layout` has one cache kind, K and V. RESOURCE_EXHAUSTED: there is no memory for the counters.
  static absl::StatusOr<std::unique_ptr<SelectionCounters>> Create(Device* device, int slots,
                                                                   const CacheLayout& layout);

  // Returns the counters of a layer, [slots].
  kernels::SparseCounters* of(int layer) const {
    return device_.as<kernels::SparseCounters>() + int64_t{layer} * slots_;
  }
  // Copies the counters from the device, waits for the copy and returns the sums. REQUIRES: no step
  // is under way.
  PolicyStatistics Sum() const;

  // PollCounters reads the counters while steps go on: it enqueues a copy of them on the steps' own
  // stream, between two steps, unless such a copy is under way. Take returns true and gives the
  // copy's sums once, when the copy is done; until then, and if there is no copy, it returns false.
  void PollCounters(Stream& stream);
  bool Take(PolicyStatistics* sums);

 private:
  SelectionCounters(Device* device, int slots, const CacheLayout& layout, Buffer on_device,
                    Buffer on_host, Buffer looked);
  void SumOf(const Buffer& host, PolicyStatistics* sums) const;

  const int slots_;
  const CacheLayout layout_;
  const Buffer device_, host_;  // SparseCounters [layers][slots]
  const Buffer looked_;         // the same, as PollCounters copied them
  const std::unique_ptr<Event> look_done_;
  bool looking_ = false;
  const std::unique_ptr<Event> copied_;
  const std::unique_ptr<Stream> stream_;
};

}  // namespace sluice
