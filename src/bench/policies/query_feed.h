// Gives a policy other queries than the predicted ones, to find out what its predictions cost: the
// policy selects, and its CPU workers attend, with the queries that the caller supplies.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/forwarding_policy.h"
#include "src/device/device.h"

namespace sluice::bench {

class QueryFeed : public ForwardingPolicy {
 public:
  // REQUIRES: `policy` outlives this, and steps have one decode row.
  static absl::StatusOr<std::unique_ptr<QueryFeed>> Create(AttentionPolicy* policy, int layers,
                                                           int heads, int head_dim, Device* device);
  // Sets the queries of the next steps, [layers][heads * head_dim], after RoPE. REQUIRES: no step
  // is under way.
  void Set(absl::Span<const float> queries);

  void Ahead(Stream& stream, int layer, const Queries& predicted) override;

 private:
  QueryFeed(AttentionPolicy* policy, int layers, int size, Buffer host, Buffer queries)
      : ForwardingPolicy(policy),
        layers_(layers),
        size_(size),
        host_(std::move(host)),
        queries_(std::move(queries)) {}

  const int layers_;
  const int size_;        // heads * head_dim
  const Buffer host_;     // pinned, [layers][size_]
  const Buffer queries_;  // on the device, [layers][size_]
};

}  // namespace sluice::bench
