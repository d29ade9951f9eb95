// Brings blocks into HBM before a sequence's first step: those that the query at the end of the
// prompt, the *anchor*, scores highest. The answer's first tokens look for the same, and heads that
// are predicted to need little attend to them too, since a row attends to all that has a place.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/block_recall.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/device/device.h"

namespace sluice {

class AnchorBlocks {
 public:
  // Returns null where there are places for the sink alone. `tier` outlives the result.
  // RESOURCE_EXHAUSTED: there is no memory for the scores.
  static absl::StatusOr<std::unique_ptr<AnchorBlocks>> Create(Device* device,
                                                              const FluxionShape& shape,
                                                              const OffloadTier* tier);

  // Enqueues the recall in one layer for the one row of a warm-up, whose query `q` [heads]
  // [head_dim] is in device memory. Each query head chooses as many blocks as all heads of a group
  // have places for. The layer's digests come before it on the stream; calls are on one stream at
  // a time. REQUIRES: the places do not have all that is older than the ring.
  void Fetch(Stream& stream, int layer, const float* q, const OffloadTier::BulkRow& row);

 private:
  AnchorBlocks(Device* device, const FluxionShape& shape, const OffloadTier* tier)
      : device_(device), shape_(shape), tier_(*tier) {}
  absl::Status Allocate();
  int32_t blocks_of_head() const {
    const int32_t places = shape_.recall_units() - shape_.sink_units;
    return places / (shape_.heads / shape_.kv_heads);
  }
  void KeepSink(Stream& stream, int layer, const OffloadTier::BulkRow& row);
  kernels::UnitLists Choose(Stream& stream, int layer, const float* q,
                            const OffloadTier::BulkRow& row);
  kernels::UnitLists Units(const Buffer& units, int32_t capacity, int of) const {
    return {units.as<int32_t>(), counts_.as<int32_t>() + of * shape_.kv_heads, capacity};
  }

  Device* const device_;
  const FluxionShape shape_;
  const OffloadTier& tier_;
  Buffer levels_, blocks_;                    // int32 [kv_heads], [heads]: constants
  Buffer scores_;                             // float [heads][score_stride]
  Buffer selected_, missing_;                 // int32 [kv_heads][most_units]
  Buffer resident_, places_;                  // int32 [kv_heads][most_units]
  Buffer sink_, local_, sink_at_, local_at_;  // lists of SegmentLists and their places
  Buffer counts_;                             // int32 [5][kv_heads]
  std::unique_ptr<BlockRecall> recall_;
};

}  // namespace sluice
