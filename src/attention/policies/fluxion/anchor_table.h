// The numbers of anchors that budgets are predicted from (kernels::FluxionAnchors), by layer and
// slot, and how they are measured.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/device/device.h"

namespace sluice {

// Only the engine's thread may call it.
class AnchorTable {
 public:
  // RESOURCE_EXHAUSTED: there is no memory for the numbers.
  static absl::StatusOr<AnchorTable> Create(Device* device, const FluxionShape& shape);

  // Returns a layer's numbers, in device memory.
  kernels::FluxionAnchors Of(int layer) const;
  // Enqueues that the slot has no anchor in a layer: its numbers are none.
  void Forget(Stream& stream, int layer, int slot) const;
  // Returns the copies that bring the slot's numbers here from `other`, in all sparse layers.
  std::vector<Stream::CopyOp> CopiesFrom(const AnchorTable& other, int slot) const;

 private:
  explicit AnchorTable(const FluxionShape& shape) : shape_(shape) {}
  // Where the numbers of a slot lie, and how many floats they are.
  struct Piece {
    float* at;
    int64_t count;
  };
  std::vector<Piece> PiecesOf(int layer, int slot) const;
  int64_t kv_numbers() const {
    return int64_t{shape_.kv_heads} * (kernels::kAnchorKvNumbers + shape_.head_dim);
  }
  int64_t head_numbers() const {
    return int64_t{shape_.heads} * (kernels::kAnchorHeadNumbers + shape_.head_dim);
  }

  FluxionShape shape_;
  Buffer kv_, heads_, resident_;  // float [layers][slots] of what FluxionAnchors has for a slot
  Buffer nothing_;                // float, pinned: not numbers, as many as the largest piece has
};

// Measures anchors with a scratch of its own, so all calls are on one stream.
class AnchorMeter {
 public:
  // `tier` outlives the result. RESOURCE_EXHAUSTED: there is no memory for the scratch.
  static absl::StatusOr<AnchorMeter> Create(Device* device, const FluxionShape& shape,
                                            const OffloadTier* tier, int64_t max_context,
                                            double tau);

  // Enqueues that one slot's anchor is measured in a layer: its query `q` [heads][head_dim], and
  // `slots` and `positions`, [1] each, are in memory of the device. The slot's host cache and its
  // digests are complete up to that position.
  void Measure(Stream& stream, int layer, const float* q, const int32_t* slots,
               const int32_t* positions, const AnchorTable& to) const;

 private:
  AnchorMeter(Device* device, const FluxionShape& shape, const OffloadTier* tier, double tau)
      : device_(device), shape_(shape), tier_(tier), tau_(static_cast<float>(tau)) {}

  Device* device_;
  FluxionShape shape_;
  const OffloadTier* tier_;
  float tau_;
  Buffer scratch_;  // AnchorStatisticsParams::scratch
};

}  // namespace sluice
